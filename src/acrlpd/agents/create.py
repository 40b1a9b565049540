"""An agent from its parts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from acrlpd.agents.agent import Agent
from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.networks import CriticNetworks
from acrlpd.agents.optimizers.base import Optimizer
from acrlpd.agents.temperature import TemperatureModule
from acrlpd.models.policy import FlowPolicy


def assemble_agent(
    policy: FlowPolicy,
    critics: CriticNetworks,
    algorithm: Algorithm,
    *,
    freeze_filter: nnx.filterlib.Filter,
    policy_optimizer: Optimizer,
    critic_optimizer: Optimizer,
    temperature_optimizer: Optimizer,
    improvement_rng: jax.Array,
    gradient_accumulation_steps: int,
) -> Agent:
    """An agent at step 0 from a policy and critics. Parameters that match `freeze_filter` never change.

    The agent takes the policy's and the critics' arrays over: a donating step uses them up. `improvement_rng` draws the
    initial parameters of an improvement that has networks of its own.
    """
    acrlpd = algorithm.acrlpd
    own_networks = algorithm.improvement.create_networks(policy, algorithm, nnx.Rngs(improvement_rng))
    improvement_def, improvement = (None, nnx.State({})) if own_networks is None else nnx.split(own_networks)
    policy_def, frozen, trainable = nnx.split(policy, freeze_filter, ...)
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    temperature_def, temperature = nnx.split(TemperatureModule(acrlpd.initial_temperature))
    return Agent(
        step=jnp.zeros((), jnp.int32),
        skipped_updates=jnp.zeros((), jnp.int32),
        policy_params=trainable,
        frozen_params=frozen,
        ema_params=None if acrlpd.ema_decay is None else jax.tree.map(jnp.copy, trainable),
        policy_opt_state=policy_optimizer.tx.init(trainable),
        critics=critics,
        critic_opt_state=critic_optimizer.tx.init(critics.online),
        temperature_params=temperature,
        temperature_opt_state=temperature_optimizer.tx.init(temperature),
        improvement_params=improvement,
        improvement_opt_state=() if own_networks is None else critic_optimizer.tx.init(improvement),
        loss_weights=jax.tree.map(lambda weight: jnp.asarray(weight, jnp.float32), acrlpd.loss_weights),
        policy_def=policy_def,
        temperature_def=temperature_def,
        improvement_def=improvement_def,
        algorithm=algorithm,
        policy_optimizer=policy_optimizer,
        critic_optimizer=critic_optimizer,
        temperature_optimizer=temperature_optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )


def load_policy_params(policy: FlowPolicy, params: Mapping[str, Any]) -> None:
    """Overwrites initial parameters of a policy; the given ones must exist there with the same shape."""
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
