"""Shapes of agents and batches, for the tests and the benchmark of the plan."""

from typing import Any

import jax
import jax.numpy as jnp

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import create_agent


def trace_agent(config: RLTrainConfig) -> Any:
    return jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))


def batch_spec(config: RLTrainConfig) -> Batch:
    size, chunk = config.batch_size, config.qchunking.horizon_length
    observation, actions = config.model.inputs_spec(size)
    uint8 = {k: jax.ShapeDtypeStruct(v.shape, jnp.uint8) for k, v in observation.images.items()}
    observation = observation.replace(images=uint8)

    def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *shape), dtype)

    return Batch(
        observations=observation,
        next_observations=observation,
        actions=actions,
        valid=spec(config.model.action_horizon),
        rewards=spec(chunk),
        masks=spec(chunk),
        terminals=spec(chunk),
        next_terminal=spec(),
        sequence_mask=spec(),
        episode_id=spec(dtype=jnp.int32),
        step_id=spec(dtype=jnp.int32),
    )
