"""From a config to an agent: the one place where the sections of the config that make an agent are read."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from acrlpd.agents.agent import Agent
from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.critics.base import ObservationReader
from acrlpd.agents.networks import CriticNetworks, OwnNetworks, TemperatureModule, create_critic_networks
from acrlpd.agents.optimizers.base import Optimizer, create_optimizer
from acrlpd.choice import kind_name
from acrlpd.config.bounds import check_bounds
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError
from acrlpd.findings import Finding, error
from acrlpd.models.policy import FlowPolicy


class RunKeys(NamedTuple):
    """The random keys of a run."""

    initial: jax.Array  # creates the agent
    updates: jax.Array  # serves all updates; each update folds the step of the agent into this key


def run_keys(rl_config: RLTrainConfig) -> RunKeys:
    """The one rule for random keys: both keys of a run follow from the seed of the config and from nothing else."""
    return RunKeys(*jax.random.split(jax.random.key(rl_config.seed)))


def create_agent(
    rl_config: RLTrainConfig,
    rng: jax.Array,
    *,
    policy_params: Mapping[str, Any] | None = None,
    data_shards: int = 1,
) -> Agent:
    """The agent of a run at step 0.

    The function can be traced: `jax.eval_shape` gives the shapes of the agent without allocating memory, and `jax.jit`
    with out_shardings creates the arrays where they belong. `policy_params` are weights to start from, as a nested dict
    in openpi's names; a parameter that the dict does not name keeps its initial value. The function reads no files:
    `create_initial_agent` reads the weights that `weight_loader` names. `data_shards` is the number of devices that
    share a batch.
    """
    # Code that makes an agent gets the errors of `validate_config` that do not need the data.
    findings = [*check_bounds(rl_config), *check_agent(rl_config)]
    errors = [message for level, message in findings if level == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    policy_rng, critic_rng = jax.random.split(rng)
    model = rl_config.model
    policy = model.create(policy_rng)
    if policy_params is not None:
        _load_policy_params(policy, policy_params)
    algorithm = Algorithm(
        rl_config.acrlpd,
        rl_config.qchunking,
        rl_config.improvement,
        rl_config.backup,
        rl_config.data.augment_images,
        rl_config.data.augmentation_level,
        data_shards,
    )
    critics = create_critic_networks(
        rl_config.critic,
        critic_rng,
        feature_dim=policy.feature_dim,
        image_keys=model.image_keys,
        state_dim=model.state_dim,
        chunk_dim=rl_config.noise_dim or rl_config.qchunking.chunk_length * rl_config.qchunking.action_dim,
    )
    improvement, backup = _create_own_networks(rl_config, algorithm, policy, critic_rng)
    return _assemble_agent(rl_config, algorithm, policy, critics, improvement, backup)


def _create_own_networks(
    rl_config: RLTrainConfig, algorithm: Algorithm, policy: FlowPolicy, rng: jax.Array
) -> tuple[nnx.Module | None, nnx.Module | None]:
    """The networks that the improvement brings along, and those of the backup; None where there are none."""
    critic, improvement, backup = rl_config.critic, None, None
    if algorithm.has_improvement:
        rngs = nnx.Rngs(jax.random.fold_in(rng, 1))
        improvement = rl_config.improvement.create_networks(policy, algorithm, critic, rngs)
    if algorithm.has_critic:
        rngs = nnx.Rngs(jax.random.fold_in(rng, 2))
        reader = ObservationReader(critic, feature_dim=policy.feature_dim, image_keys=policy.image_keys, rngs=rngs)
        backup = rl_config.backup.create_networks(
            critic=critic, qchunking=rl_config.qchunking, reader=reader, state_dim=policy.state_dim, rngs=rngs
        )
    return improvement, backup


def _assemble_agent(
    rl_config: RLTrainConfig,
    algorithm: Algorithm,
    policy: FlowPolicy,
    critics: CriticNetworks,
    improvement: nnx.Module | None,  # the networks that the improvement brings along
    backup: nnx.Module | None,
) -> Agent:
    """The networks with their optimizers. A train step that donates the agent uses up the arrays of the networks."""
    acrlpd = rl_config.acrlpd
    policy_optimizer = create_optimizer(rl_config.actor_optimizer, rl_config.actor_lr_schedule)
    critic_optimizer = create_optimizer(rl_config.critic_optimizer, rl_config.critic_lr_schedule)
    temperature_optimizer = create_optimizer(rl_config.temperature_optimizer, rl_config.temperature_lr_schedule)
    freeze_filter = rl_config.model.get_freeze_filter(freeze_pi0_backbone=rl_config.freeze_pi0_backbone)
    if rl_config.freezes_policy:
        freeze_filter = nnx.Everything()
    if acrlpd.critic_ema_decay is not None:
        critics = critics.replace(average=jax.tree.map(jnp.copy, critics.online))
    policy_def, frozen, *[trainable] = nnx.split(policy, freeze_filter, ...)
    temperature_def, temperature = nnx.split(TemperatureModule(acrlpd.initial_temperature))
    return Agent(
        step=jnp.zeros((), jnp.int32),
        skipped_updates=jnp.zeros((), jnp.int32),
        policy_params=trainable,
        frozen_params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen),
        ema_params=None if acrlpd.ema_decay is None else jax.tree.map(jnp.copy, trainable),
        policy_opt_state=policy_optimizer.tx.init(trainable),
        critics=critics,
        critic_opt_state=critic_optimizer.tx.init(critics.online),
        temperature_params=temperature,
        temperature_opt_state=temperature_optimizer.tx.init(temperature),
        improvement=_own_networks(improvement, critic_optimizer),
        backup=_own_networks(backup, critic_optimizer),
        loss_weights=jax.tree.map(lambda weight: jnp.asarray(weight, jnp.float32), acrlpd.loss_weights),
        policy_def=policy_def,
        temperature_def=temperature_def,
        algorithm=algorithm,
        policy_optimizer=policy_optimizer,
        critic_optimizer=critic_optimizer,
        temperature_optimizer=temperature_optimizer,
        gradient_accumulation_steps=rl_config.training.gradient_accumulation_steps,
    )


def _own_networks(module: nnx.Module | None, optimizer: Optimizer) -> OwnNetworks:
    if module is None:
        return OwnNetworks(nnx.State({}), (), None)
    network, params = nnx.split(module)
    return OwnNetworks(params, optimizer.tx.init(params), network)


def _load_policy_params(policy: FlowPolicy, params: Mapping[str, Any]) -> None:
    """Overwrites initial parameters of a policy; each given parameter must exist with the same shape."""
    state = nnx.state(policy)
    known = dict(nnx.to_flat_state(state))
    for path, value in traverse_util.flatten_dict(dict(params)).items():
        name = "/".join(map(str, path))
        if path not in known:
            raise ValueError(f"policy_params names {name}, which the policy does not have")
        if known[path].shape != value.shape:
            raise ValueError(f"policy_params {name} must have shape {known[path].shape}; found {value.shape}")
        known[path] = known[path].replace(jnp.asarray(value, known[path].dtype))
    nnx.update(policy, nnx.from_flat_state(known))


def check_agent(rl_config: RLTrainConfig) -> Iterator[Finding]:
    """What is wrong with the sections that make an agent, beyond the bounds of single fields."""
    model, acrlpd = rl_config.model, rl_config.acrlpd
    yield from rl_config.qchunking.check(policy_action_horizon=model.action_horizon, policy_action_dim=model.action_dim)
    yield from acrlpd.check(improvement_judges=rl_config.improvement.judges)
    yield from rl_config.critic.check(model)
    yield from _check_sampling(rl_config)
    if acrlpd.loss_weights.critic_weight > 0:
        yield from rl_config.backup.check(acrlpd, model=model, qchunking=rl_config.qchunking)
    if acrlpd.loss_weights.actor_weight > 0:
        yield from rl_config.improvement.check(
            acrlpd, model=model, critic=rl_config.critic, frozen_backbone=rl_config.freeze_pi0_backbone
        )
    improves_by_cloning = acrlpd.loss_weights.actor_weight > 0 and rl_config.improvement.clones_logged_actions
    if acrlpd.policy_data != "all" and acrlpd.loss_weights.bc_weight == 0 and not improves_by_cloning:
        yield error(
            f"acrlpd.policy_data {acrlpd.policy_data} chooses what the policy is cloned from, and nothing is cloned: "
            "raise acrlpd.loss_weights.bc_weight above 0, or set acrlpd.policy_data all"
        )


def _check_sampling(rl_config: RLTrainConfig) -> Iterator[Finding]:
    """Settings that do not fit the number of candidates, the loss of the policy, or how the policy makes chunks."""
    model, acrlpd = rl_config.model, rl_config.acrlpd
    candidates = rl_config.online.best_of_n or rl_config.evaluation.best_of_n or acrlpd.num_action_samples
    if rl_config.training.online_steps > 0 and acrlpd.best_of_n.top_k > candidates:
        yield error(
            f"acrlpd.best_of_n.top_k {acrlpd.best_of_n.top_k} exceeds the {candidates} candidates of online rounds: "
            "lower top_k, or raise online.best_of_n"
        )
    if model.has_density and acrlpd.bc_difficulty_weighting:
        yield error(
            f"acrlpd.bc_difficulty_weighting weighs samples by their loss, and the loss of the {kind_name(model)} "
            "policy, -log pi, may be below 0: set acrlpd.bc_difficulty_weighting false"
        )
    if model.candidates_are_equal and acrlpd.loss_weights.critic_weight > 0 and acrlpd.num_action_samples > 1:
        yield error(
            f"all {acrlpd.num_action_samples} candidates of an observation would be equal: set model.temperature above "
            "0, for example 0.7, or acrlpd.num_action_samples 1"
        )
    if model.samples_tokens and acrlpd.flow_times != "beta":
        yield error(
            f"acrlpd.flow_times {acrlpd.flow_times} is about flows, and the {kind_name(model)} policy draws tokens: "
            "leave acrlpd.flow_times out"
        )


def follow_config(agent: Agent, rl_config: RLTrainConfig) -> Agent:
    """The agent with the loss weights of the config and, if the temperature is not learned, with its temperature.

    These arrays are not trained, and an agent from a checkpoint has the values of the config that it was saved with.
    """
    acrlpd = rl_config.acrlpd

    def in_place_of(old: jax.Array, new: jax.typing.ArrayLike) -> jax.Array:
        return jax.device_put(np.asarray(new, old.dtype), old.sharding)

    agent = agent.replace(loss_weights=jax.tree.map(in_place_of, agent.loss_weights, acrlpd.loss_weights))
    if acrlpd.learnable_temperature:
        return agent
    temperature = nnx.state(TemperatureModule(acrlpd.initial_temperature))
    return agent.replace(temperature_params=jax.tree.map(in_place_of, agent.temperature_params, temperature))
