"""Small configs and random batches for agents."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.agents import Agent
from acrlpd.agents.backups.base import Backup
from acrlpd.agents.backups.best_of_n import BestOfN
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.improvements.base import Improvement, Info
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.batch import Batch, Returns
from acrlpd.choice import find_kind
from acrlpd.config import ACRLPDHyperparams, LossWeights, QChunkingConfig, RLTrainConfig, TrainingConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import draw_noise
from acrlpd.policies.acting_model import ChosenActions, acting_model, choose_actions

# Here it is compiling that takes the time, so XLA is asked to try less hard; the numbers are the same.
QUICK = {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


def quick_call(step: Any, *args: Any, **static: Any) -> Any:
    """One call of a jitted function, compiled like `quick_jit`."""
    return step.lower(*args, **static).compile(compiler_options=QUICK)(*args)


# T = 4 steps of 3 dims, of which critics see H = 3 steps of 2 dims: every cut shows.
STATE_MODEL = StateFlowPolicyConfig(state_dim=6, action_dim=3, action_horizon=4, hidden_dims=(32,))
STATE_CHUNKING = QChunkingConfig(horizon_length=3, action_dim=2)


def make_config(
    *,
    model: Any = STATE_MODEL,
    qchunking: QChunkingConfig = STATE_CHUNKING,
    critic: dict[str, Any] | None = None,
    accumulation: int = 1,
    learning_rate: float = 1e-3,
    freeze_pi0_backbone: bool = False,
    improvement: str | Improvement = "awr",
    backup: Backup | None = None,
    **hyperparams: Any,
) -> RLTrainConfig:
    """A config whose defaults exercise every loss term."""
    hyperparams = {
        "loss_weights": LossWeights(critic_weight=1.0, actor_weight=0.7, bc_weight=0.5, alpha_weight=0.3),
        "num_action_samples": 4,
        "sampling_steps": 2,
        "initial_temperature": 0.5,
        "learnable_temperature": True,
        **hyperparams,
    }
    critic = {"num_critics": 3, "hidden_dims": (24,), **(critic or {})}
    return RLTrainConfig(
        name="test",
        model=model,
        freeze_pi0_backbone=freeze_pi0_backbone,
        critic=MLPCritics(**critic),
        acrlpd=ACRLPDHyperparams(**hyperparams),
        improvement=find_kind(Improvement, improvement)() if isinstance(improvement, str) else improvement,
        backup=backup or BestOfN(),
        qchunking=qchunking,
        actor_lr_schedule=ConstantSchedule(learning_rate),
        actor_optimizer=AdamW(b2=0.999, weight_decay=0.0),
        critic_lr_schedule=ConstantSchedule(learning_rate),
        critic_optimizer=AdamW(b2=0.999, weight_decay=0.0),
        temperature_lr_schedule=ConstantSchedule(learning_rate),
        training=TrainingConfig(gradient_accumulation_steps=accumulation),
    )


def tiny_pi0(**changes: Any) -> Pi0Config:
    """pi0 with a prompt and no camera: the smallest one that is a pi0."""
    fields = {
        "dtype": "float32",
        "paligemma_variant": "dummy",
        "action_expert_variant": "dummy",
        "siglip_variant": "mu/14",
        "vocab_size": 64,
        "action_dim": 8,
        "action_horizon": 4,
        "max_token_len": 6,
        "image_resolution": (28, 28),
        "image_keys": (),
    }
    return Pi0Config(**{**fields, **changes})


def choose(
    agent: Agent, rng: jax.Array, observation: Observation, *, num_samples: int | None = None, average: bool = True
) -> ChosenActions:
    """What the agent does: its config's best of N, with the noise of `rng`."""
    hyperparams, policy = agent.algorithm.acrlpd, agent.policy()
    n = hyperparams.num_action_samples if num_samples is None else num_samples
    b = observation.state.shape[0]
    return choose_actions(
        acting_model(agent, average=average),
        observation,
        draw_noise(rng, (b, n, policy.action_horizon, policy.action_dim)),
        jnp.full(b, n),
        jax.random.bits(rng, (b,), jnp.uint32),
        num_steps=hyperparams.sampling_steps,
        exploration=hyperparams.best_of_n,
    )


def make_batch(config: RLTrainConfig, batch_size: int, seed: int = 0, *, all_valid: bool = False) -> Batch:
    """Random numbers everywhere; some windows end early, some in a terminal, some are not for the critic."""
    rng = np.random.default_rng(seed)
    observation_spec, action_spec = config.model.inputs_spec(batch_size, labelled_prompts=config.labels_prompts)
    b, horizon = batch_size, config.qchunking.horizon_length
    lengths = rng.integers(1, action_spec.shape[1] + 3, b)  # valid steps of the window
    steps = np.arange(action_spec.shape[1])
    valid = np.ones((b, len(steps))) if all_valid else (steps < lengths[:, None])
    terminal = (rng.random(b) < 0.5) & (lengths <= horizon) & (not all_valid)
    terminals = terminal[:, None] & (steps[:horizon] == lengths[:, None] - 1)
    masks = 1 - np.maximum.accumulate(terminals, axis=1)
    in_reach = all_valid | terminal | (lengths > horizon)

    def f32(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.float32)

    return Batch(
        observations=fill(observation_spec, rng),
        next_observations=fill(observation_spec, rng),
        actions=f32(rng.normal(size=action_spec.shape)),
        valid=f32(valid),
        rewards=f32(rng.normal(size=(b, horizon)) * valid[:, :horizon]),
        masks=f32(masks),
        terminals=f32(terminals),
        next_terminal=f32(terminals.any(axis=1)),
        sequence_mask=f32(in_reach),
        leads_to_success=f32(rng.random(b) < 0.5),
        importance=jnp.ones(b, jnp.float32),
        task_id=jnp.asarray(rng.integers(0, 2, b), jnp.int32),
        episode_id=jnp.zeros(b, jnp.int32),
        step_id=jnp.arange(b, dtype=jnp.int32),
        returns=make_returns(b, rng) if config.labels_prompts else None,
    )


def make_returns(b: int, rng: np.random.Generator) -> Returns:
    """Random returns; some windows are the last of their episode, some begin after its success, some are human."""
    numbers = jnp.asarray(-rng.random((2, b)), jnp.float32)
    shares = np.array([[0.7], [0.5], [0.8], [0.2]])
    goes_on, fails, counts, human = jnp.asarray(rng.random((4, b)) < shares, jnp.float32)
    return Returns(*numbers, goes_on, (1 - goes_on) * fails, counts, human)


def fill(spec: Observation, rng: np.random.Generator) -> Observation:
    """Random values in the shapes and dtypes of an observation."""

    def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            return jnp.asarray(rng.random(leaf.shape) < 0.8).at[..., 0].set(True)
        if leaf.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 60, leaf.shape), jnp.int32)
        return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree.map(values, spec)


def random_like(tree: Any, seed: int = 0, scale: float = 0.3) -> Any:
    """Float leaves replaced by small random numbers; quicker than compiling an initialisation."""
    rng = np.random.default_rng(seed)

    def values(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(values, tree)


def random_agent(config: RLTrainConfig) -> Agent:
    """An agent of this config whose parameters and moments are small random numbers."""
    return random_like(jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0)))


def compute_part(agent: Agent, part: str, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
    """One of the losses alone, with weight 1, or the "joint" loss with the agent's own weights."""
    alone = {"critic": (1.0, 0.0, 0.0, 0.0), "actor": (0.0, 1.0, 0.0, 0.0), "bc": (0.0, 0.0, 1.0, 0.0)}
    if part != "joint":
        agent = agent.replace(loss_weights=LossWeights(*alone[part]))
    return agent.compute_loss(batch, rng)


def learned_parts(agent: Agent) -> dict[str, Any]:
    """Everything in the agent that could have a gradient."""
    parts = {name: getattr(agent, name) for name in ("policy_params", "ema_params", "critics", "temperature_params")}
    return parts | {"improvement": agent.improvement.params, "backup": agent.backup.params}


def with_parts(agent: Agent, parts: dict[str, Any]) -> Agent:
    """The agent with other `learned_parts`."""
    own = {name: getattr(agent, name).replace(params=parts[name]) for name in ("improvement", "backup")}
    return agent.replace(**(parts | own))


def replace_acrlpd(config: RLTrainConfig, **changes: Any) -> RLTrainConfig:
    return dataclasses.replace(config, acrlpd=dataclasses.replace(config.acrlpd, **changes))


def assert_trees_close(actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_trees_identical(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
