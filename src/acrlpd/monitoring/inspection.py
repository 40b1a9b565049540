"""What debug mode computes on the devices: gradients by layer group, actions, critics and choices.

This is the only module of monitoring that looks inside an agent.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.agents.accumulation import split_batch
from acrlpd.agents.best_of_n import BestOfN
from acrlpd.batch import Batch

# Normalised actions beyond this count in the outermost bins.
ACTION_RANGE = 3.0
NUM_BINS = 40
# Parts of a parameter's name that make its group, at most.
_GROUP_DEPTH = 5
# Modules whose parameters are stacked along a leading axis, one entry per layer.
_STACKED = ("layers", "encoderblock")


# Arrays in nested dicts, with the names that they have in the file of an inspection.
Inspection = dict[str, Any]


def inspect_update(agent: Agent, batch: Batch, rng: jax.Array) -> Inspection:
    """Inspects the update that `agent` is about to make on `batch` with the run's key; changes nothing.

    With gradient accumulation only the first micro-batch is inspected: more may not fit into memory.
    """
    sharding = agent.step.sharding
    mesh = getattr(sharding, "mesh", None)
    with jax.set_mesh(mesh) if isinstance(mesh, jax.sharding.Mesh) else contextlib.nullcontext():
        return _compiled(sharding)(agent, batch, rng)


@functools.cache
def _compiled(sharding: jax.sharding.Sharding) -> Callable[[Agent, Batch, jax.Array], Inspection]:
    """The compiled inspection. Every process gets the whole result.

    On CPUs the compiler does not optimise: that would take longer than all inspections of a run.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(_inspect, out_shardings=sharding, compiler_options=options)


def _inspect(agent: Agent, batch: Batch, rng: jax.Array) -> Inspection:
    """Looks at one batch; a = real action dims. Without a critic there are no entries about critics and choices."""
    rng = jax.random.fold_in(rng, agent.step)
    if agent.gradient_accumulation_steps > 1:
        batch = jax.tree.map(lambda x: x[0], split_batch(batch, agent.gradient_accumulation_steps))
    algorithm = agent.algorithm
    num_samples = None if algorithm.has_critic else 1  # without a critic nothing is chosen
    choice = agent.best_of_n(jax.random.fold_in(rng, 1), batch.observations, num_samples=num_samples, use_ema=False)
    chosen, logged = algorithm.critic_chunks(choice.actions), algorithm.critic_chunks(batch.actions)
    inspection = {
        "gradient_norms": gradient_norms(agent, batch, rng),
        "actions": {
            "data": _histograms(logged, algorithm.qchunking.action_dim),  # int32 [a, NUM_BINS]
            "chosen": _histograms(chosen, algorithm.qchunking.action_dim),
            "distance": jnp.sqrt(jnp.mean(jnp.square(chosen - logged))),
        },
    }
    return inspection | (_inspect_critics(agent, batch, choice) if algorithm.has_critic else {})


def _inspect_critics(agent: Agent, batch: Batch, choice: BestOfN) -> Inspection:
    """The values of E critics at the logged chunks that they learn from, and which of N candidates they choose."""
    networks = agent.networks()
    observation = networks.policy.preprocess(None, batch.observations, train=False)
    chunk = agent.algorithm.critic_chunks(batch.actions)
    ensemble, features = networks.critics.online_ensemble, networks.encode(observation).features
    member_q = ensemble(features, observation.state, chunk[:, None])[:, 0]  # [b, E]
    mask = jnp.asarray(batch.sequence_mask, bool)[:, None]
    q = choice.q_values
    ends = {"lowest": jnp.mean(jnp.min(q, axis=1)), "mean": jnp.mean(q), "highest": jnp.mean(jnp.max(q, axis=1))}
    return {
        "critics": {
            "mean_q": jnp.mean(member_q, axis=0, where=mask),  # [E]
            "std_q": jnp.std(member_q, axis=0, where=mask),
        },
        # How often each candidate was chosen, int32 [N], and the values of the candidates, mean over the batch.
        "best_of_n": {"choices": jnp.bincount(choice.index, length=q.shape[1]), "candidate_q": ends},
    }


def gradient_norms(agent: Agent, batch: Batch, rng: jax.Array) -> dict[str, jax.Array]:
    """Norms of the joint loss's gradient by group, "policy/..." and "critic/...", before clipping.

    A group whose layers are stacked has one norm per layer, [layers]; other groups have one, [1].
    """

    def loss(params: dict[str, Any]) -> jax.Array:
        critics = agent.critics.replace(online=params["critic"])
        return agent.replace(policy_params=params["policy"], critics=critics).compute_loss(batch, rng)[0]

    grads = jax.grad(loss)({"policy": agent.policy_params, "critic": agent.critics.online})
    squares: dict[str, jax.Array] = {}
    for component, state in grads.items():
        for path, leaf in nnx.to_flat_state(state):
            group, is_stacked = layer_group(path)
            axes = tuple(range(1, leaf.ndim)) if is_stacked else None
            square = jnp.atleast_1d(jnp.sum(jnp.square(leaf[...].astype(jnp.float32)), axis=axes))
            squares[f"{component}/{group}"] = squares.get(f"{component}/{group}", 0.0) + square
    return {group: jnp.sqrt(square) for group, square in sorted(squares.items())}


def layer_group(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The group of a parameter by its name, and whether its leading axis counts layers."""
    names = [str(part) for part in path]
    modules = names[:-1] or names
    return "/".join(modules[:_GROUP_DEPTH]), any(name in _STACKED for name in names)


def _histograms(chunks: jax.Array, action_dim: int) -> jax.Array:
    """A histogram of every action dim over samples and steps, [b, H * a] -> [a, NUM_BINS]."""
    actions = chunks.reshape(-1, action_dim)
    place = (actions + ACTION_RANGE) / (2 * ACTION_RANGE) * NUM_BINS
    index = jnp.clip(jnp.floor(place), 0, NUM_BINS - 1).astype(jnp.int32)
    return jax.vmap(lambda column: jnp.bincount(column, length=NUM_BINS), in_axes=1)(index)


def summarize(inspection: Inspection) -> dict[str, float]:
    """The numbers of an inspection that become metrics; its arrays must be on the host."""
    norms, actions = inspection["gradient_norms"], inspection["actions"]
    metrics = {f"debug/gradient/{group}": float(np.linalg.norm(found)) for group, found in norms.items()}
    metrics["debug/action_distance"] = float(actions["distance"])
    metrics["debug/action_overlap"] = histogram_overlap(actions["data"], actions["chosen"])
    if "best_of_n" not in inspection:
        return metrics
    choices, candidate_q = inspection["best_of_n"]["choices"], inspection["best_of_n"]["candidate_q"]
    share = np.asarray(choices, np.float64) / np.sum(choices)
    entropy = -float(np.sum(share * np.log(share, where=share > 0, out=np.zeros_like(share))))
    return metrics | {
        "debug/critic_range": float(np.ptp(inspection["critics"]["mean_q"])),
        "debug/candidate_q_range": float(candidate_q["highest"]) - float(candidate_q["lowest"]),
        # 1: every index is chosen as often as any other, which is healthy; 0: the same index is always chosen.
        "debug/choice_entropy": entropy / float(np.log(max(len(share), 2))),
    }


def histogram_overlap(first: Any, second: Any) -> float:
    """The share that two sets of histograms [a, bins] have in common: 1 where they are equal, 0 where apart."""
    shares = [np.asarray(x, np.float64) / np.sum(x, axis=1, keepdims=True) for x in (first, second)]
    return float(np.mean(np.sum(np.minimum(*shares), axis=1)))
