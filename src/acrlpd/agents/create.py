"""Agents from configs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from acrlpd.agents.acrlpd_pi0_agent import ACRLPDPi0Agent
from acrlpd.agents.critic_networks import CriticNetworks, create_critic_networks
from acrlpd.agents.loss_functions import Algorithm
from acrlpd.agents.optimizers import Optimizer, create_optimizer
from acrlpd.agents.temperature import TemperatureModule
from acrlpd.config import AdamW, ConstantSchedule, RLTrainConfig
from acrlpd.models.policy import FlowPolicy

_DEFAULT_OPTIMIZER = (AdamW(), ConstantSchedule())


def create_acrlpd_pi0_agent_from_rl_config(
    rl_config: RLTrainConfig,
    rng: jax.Array,
    *,
    policy_params: Mapping[str, Any] | None = None,
    data_shards: int = 1,
) -> ACRLPDPi0Agent:
    """The agent of a run at step 0.

    Can be traced: `jax.eval_shape` gives its shapes without allocating, and `jax.jit` with out_shardings
    lets it be born sharded. `policy_params` are weights to start from as a nested dict in openpi's names;
    parameters it does not name keep their initial values. `data_shards` is the number of devices that
    share a batch.
    """
    policy_rng, critic_rng = jax.random.split(rng)
    model = rl_config.model
    policy = model.create(policy_rng)
    if policy_params is not None:
        _load(policy, policy_params)
    algorithm = Algorithm(rl_config.acrlpd, rl_config.qchunking, rl_config.data.augment_images, data_shards)
    _check(algorithm, policy)
    critics = create_critic_networks(
        rl_config.critic,
        critic_rng,
        feature_dim=policy.feature_dim,
        state_dim=model.inputs_spec()[0].state.shape[-1],
        chunk_dim=algorithm.critic_action_horizon * rl_config.qchunking.action_dim,
    )
    return create_acrlpd_pi0_agent(
        policy,
        critics,
        algorithm,
        freeze_filter=model.get_freeze_filter(freeze_pi0_backbone=rl_config.freeze_pi0_backbone),
        policy_optimizer=create_optimizer(rl_config.actor_optimizer, rl_config.actor_lr_schedule),
        critic_optimizer=create_optimizer(rl_config.critic_optimizer, rl_config.critic_lr_schedule),
        temperature_optimizer=create_optimizer(rl_config.temperature_optimizer, rl_config.temperature_lr_schedule),
        gradient_accumulation_steps=rl_config.training.gradient_accumulation_steps,
    )


def create_acrlpd_pi0_agent(
    pi0_model: FlowPolicy,
    critic_networks: CriticNetworks,
    algorithm: Algorithm,
    *,
    freeze_filter: nnx.filterlib.Filter | None = None,
    policy_optimizer: Optimizer | None = None,
    critic_optimizer: Optimizer | None = None,
    temperature_optimizer: Optimizer | None = None,
    gradient_accumulation_steps: int = 1,
) -> ACRLPDPi0Agent:
    """An agent at step 0 from a policy and critics. Parameters that match `freeze_filter` never change.

    The agent takes the policy's and the critics' arrays over: a donating step uses them up.
    """
    _check(algorithm, pi0_model)
    acrlpd = algorithm.acrlpd
    policy_optimizer = policy_optimizer or create_optimizer(*_DEFAULT_OPTIMIZER)
    critic_optimizer = critic_optimizer or create_optimizer(*_DEFAULT_OPTIMIZER)
    temperature_optimizer = temperature_optimizer or create_optimizer(*_DEFAULT_OPTIMIZER)

    frozen_filter = nnx.Nothing() if freeze_filter is None else freeze_filter
    policy_def, frozen, *rest = nnx.split(pi0_model, frozen_filter, ...)
    [trainable] = rest
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    temperature_def, temperature = nnx.split(TemperatureModule(acrlpd.initial_temperature))
    zero = jnp.zeros((), jnp.int32)
    return ACRLPDPi0Agent(
        step=zero,
        skipped_updates=jnp.copy(zero),
        policy_params=trainable,
        frozen_params=frozen,
        ema_params=None if acrlpd.ema_decay is None else jax.tree.map(jnp.copy, trainable),
        policy_opt_state=policy_optimizer.tx.init(trainable),
        critics=critic_networks,
        critic_opt_state=critic_optimizer.tx.init(critic_networks.online),
        temperature_params=temperature,
        temperature_opt_state=temperature_optimizer.tx.init(temperature),
        loss_weights=jax.tree.map(lambda weight: jnp.asarray(weight, jnp.float32), acrlpd.loss_weights),
        policy_def=policy_def,
        temperature_def=temperature_def,
        algorithm=algorithm,
        policy_optimizer=policy_optimizer,
        critic_optimizer=critic_optimizer,
        temperature_optimizer=temperature_optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )


def follow_config(agent: ACRLPDPi0Agent, rl_config: RLTrainConfig) -> ACRLPDPi0Agent:
    """The agent with the arrays that nobody learns as the config has them: loss weights, and a fixed temperature.

    An agent that comes from a checkpoint has those of the config that it was saved with.
    """
    acrlpd = rl_config.acrlpd

    def in_place_of(old: jax.Array, new: jax.typing.ArrayLike) -> jax.Array:
        return jax.device_put(np.asarray(new, old.dtype), old.sharding)

    agent = agent.replace(loss_weights=jax.tree.map(in_place_of, agent.loss_weights, acrlpd.loss_weights))
    if acrlpd.learnable_temperature:
        return agent
    temperature = nnx.state(TemperatureModule(acrlpd.initial_temperature))
    return agent.replace(temperature_params=jax.tree.map(in_place_of, agent.temperature_params, temperature))


def _load(policy: FlowPolicy, params: Mapping[str, Any]) -> None:
    """Overwrites initial parameters by given ones, which must exist in the policy with the same shape."""
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


def _check(algorithm: Algorithm, policy: FlowPolicy) -> None:
    """Refuses sizes that cannot work, before anything is compiled."""
    acrlpd, qchunking = algorithm.acrlpd, algorithm.qchunking
    if qchunking.horizon_length > policy.action_horizon:
        raise ValueError(
            f"qchunking.horizon_length {qchunking.horizon_length} exceeds the policy's action_horizon "
            f"{policy.action_horizon}: shorten the chunk or lengthen the policy's"
        )
    if algorithm.critic_action_horizon > qchunking.horizon_length:
        raise ValueError(
            f"qchunking.critic_action_horizon {algorithm.critic_action_horizon} exceeds horizon_length "
            f"{qchunking.horizon_length}"
        )
    if qchunking.action_dim > policy.action_dim:
        raise ValueError(
            f"qchunking.action_dim {qchunking.action_dim} (the robot's) exceeds the policy's {policy.action_dim}"
        )
    if acrlpd.num_action_samples < 1:
        raise ValueError(f"acrlpd.num_action_samples must be at least 1; found {acrlpd.num_action_samples}")
    if acrlpd.learnable_temperature and acrlpd.num_action_samples < 2:
        raise ValueError(
            "a learned temperature needs the spread of at least 2 candidates: raise "
            "acrlpd.num_action_samples or set acrlpd.learnable_temperature to false"
        )
