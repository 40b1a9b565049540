"""What debug mode computes on the devices: gradients by layer group, actions, critics and choices.

This is the only module of monitoring that looks inside an agent.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
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


@flax.struct.dataclass
class CriticInspection:
    """The values of E critics, and which of N candidates they choose."""

    member_q: jax.Array  # [E] at the logged chunk, mean over the windows that the critics learn from
    member_q_std: jax.Array  # [E]
    candidate_q: jax.Array  # [3] lowest, mean and highest value of the candidates, mean over the batch
    choices: jax.Array  # int32 [N] how often each candidate was chosen


@flax.struct.dataclass
class Inspection:
    """One inspection of one batch; a = real action dims."""

    gradient_norms: dict[str, jax.Array]  # group -> [layers], or [1] where layers are not stacked
    data_actions: jax.Array  # int32 [a, NUM_BINS] histograms over the chunk that the critics see
    chosen_actions: jax.Array  # int32 [a, NUM_BINS]
    chosen_distance: jax.Array  # root mean square of chosen minus logged action
    critics: CriticInspection | None  # None in a run that trains no critic


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
    rng = jax.random.fold_in(rng, agent.step)
    if agent.gradient_accumulation_steps > 1:
        batch = jax.tree.map(lambda x: x[0], split_batch(batch, agent.gradient_accumulation_steps))
    algorithm = agent.algorithm
    num_samples = None if algorithm.has_critic else 1  # without a critic nothing is chosen
    choice = agent.best_of_n(jax.random.fold_in(rng, 1), batch.observations, num_samples=num_samples, use_ema=False)
    chosen, logged = algorithm.critic_chunks(choice.actions), algorithm.critic_chunks(batch.actions)
    return Inspection(
        gradient_norms=gradient_norms(agent, batch, rng),
        data_actions=_histograms(logged, algorithm.qchunking.action_dim),
        chosen_actions=_histograms(chosen, algorithm.qchunking.action_dim),
        chosen_distance=jnp.sqrt(jnp.mean(jnp.square(chosen - logged))),
        critics=_inspect_critics(agent, batch, choice) if algorithm.has_critic else None,
    )


def _inspect_critics(agent: Agent, batch: Batch, choice: BestOfN) -> CriticInspection:
    networks = agent.networks()
    observation = networks.policy.preprocess(None, batch.observations, train=False)
    chunk = agent.algorithm.critic_chunks(batch.actions)
    ensemble, features = networks.critics.online_ensemble, networks.encode(observation).features
    member_q = ensemble(features, observation.state, chunk[:, None])[:, 0]  # [b, E]
    mask = jnp.asarray(batch.sequence_mask, bool)[:, None]
    q = choice.q_values
    return CriticInspection(
        member_q=jnp.mean(member_q, axis=0, where=mask),
        member_q_std=jnp.std(member_q, axis=0, where=mask),
        candidate_q=jnp.stack([jnp.mean(jnp.min(q, axis=1)), jnp.mean(q), jnp.mean(jnp.max(q, axis=1))]),
        choices=jnp.bincount(choice.index, length=q.shape[1]),
    )


def gradient_norms(agent: Agent, batch: Batch, rng: jax.Array) -> dict[str, jax.Array]:
    """Norms of the joint loss's gradient by group, "policy/..." and "critic/...", before clipping."""

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
    metrics = {
        f"debug/gradient/{group}": float(np.linalg.norm(norms)) for group, norms in inspection.gradient_norms.items()
    }
    metrics |= {
        "debug/action_distance": float(inspection.chosen_distance),
        "debug/action_overlap": histogram_overlap(inspection.data_actions, inspection.chosen_actions),
    }
    return metrics if inspection.critics is None else metrics | _summarize_critics(inspection.critics)


def _summarize_critics(critics: CriticInspection) -> dict[str, float]:
    choices = np.asarray(critics.choices, np.float64)
    share = choices / choices.sum()
    entropy = -float(np.sum(share * np.log(share, where=share > 0, out=np.zeros_like(share))))
    low, _, high = map(float, critics.candidate_q)
    return {
        "debug/critic_range": float(np.ptp(critics.member_q)),
        "debug/candidate_q_range": high - low,
        # 1: every index is chosen as often as any other, which is healthy; 0: the same index is always chosen.
        "debug/choice_entropy": entropy / float(np.log(max(len(choices), 2))),
    }


def histogram_overlap(first: Any, second: Any) -> float:
    """The share that two sets of histograms [a, bins] have in common: 1 where they are equal, 0 where apart."""
    shares = [np.asarray(x, np.float64) / np.sum(x, axis=1, keepdims=True) for x in (first, second)]
    return float(np.mean(np.sum(np.minimum(*shares), axis=1)))
