"""Agents from configs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from acrlpd.agents.agent import Agent
from acrlpd.agents.critic_networks import CriticNetworks
from acrlpd.agents.loss_functions import Algorithm
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.optimizers.base import Optimizer, create_optimizer
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.temperature import TemperatureModule
from acrlpd.models.policy import FlowPolicy

_DEFAULT_OPTIMIZER = (AdamW(), ConstantSchedule())


def assemble_agent(
    pi0_model: FlowPolicy,
    critic_networks: CriticNetworks,
    algorithm: Algorithm,
    *,
    freeze_filter: nnx.filterlib.Filter | None = None,
    policy_optimizer: Optimizer | None = None,
    critic_optimizer: Optimizer | None = None,
    temperature_optimizer: Optimizer | None = None,
    gradient_accumulation_steps: int = 1,
) -> Agent:
    """An agent at step 0 from a policy and critics. Parameters that match `freeze_filter` never change.

    The agent takes the policy's and the critics' arrays over: a donating step uses them up.
    """
    check_sizes(algorithm, pi0_model)
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
    return Agent(
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


def load_policy_params(policy: FlowPolicy, params: Mapping[str, Any]) -> None:
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


def check_sizes(algorithm: Algorithm, policy: FlowPolicy) -> None:
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
