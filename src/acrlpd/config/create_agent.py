"""From a config to an agent: the one place where every section of the config that an agent needs is read."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from acrlpd.agents.agent import Agent
from acrlpd.agents.create import assemble_agent, check_sizes, load_policy_params
from acrlpd.agents.critic_networks import create_critic_networks
from acrlpd.agents.loss_functions import Algorithm
from acrlpd.agents.optimizers.base import create_optimizer
from acrlpd.agents.temperature import TemperatureModule
from acrlpd.config.train_config import RLTrainConfig


def create_agent(
    rl_config: RLTrainConfig,
    rng: jax.Array,
    *,
    policy_params: Mapping[str, Any] | None = None,
    data_shards: int = 1,
) -> Agent:
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
        load_policy_params(policy, policy_params)
    algorithm = Algorithm(rl_config.acrlpd, rl_config.qchunking, rl_config.data.augment_images, data_shards)
    check_sizes(algorithm, policy)
    critics = create_critic_networks(
        rl_config.critic,
        critic_rng,
        feature_dim=policy.feature_dim,
        state_dim=model.inputs_spec()[0].state.shape[-1],
        chunk_dim=algorithm.critic_action_horizon * rl_config.qchunking.action_dim,
    )
    return assemble_agent(
        policy,
        critics,
        algorithm,
        freeze_filter=model.get_freeze_filter(freeze_pi0_backbone=rl_config.freeze_pi0_backbone),
        policy_optimizer=create_optimizer(rl_config.actor_optimizer, rl_config.actor_lr_schedule),
        critic_optimizer=create_optimizer(rl_config.critic_optimizer, rl_config.critic_lr_schedule),
        temperature_optimizer=create_optimizer(rl_config.temperature_optimizer, rl_config.temperature_lr_schedule),
        gradient_accumulation_steps=rl_config.training.gradient_accumulation_steps,
    )


def follow_config(agent: Agent, rl_config: RLTrainConfig) -> Agent:
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
