"""An improvement of our own that has a network and changes what the policy proposes."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.improvements.base import Improvement, SampleWeights, View
from acrlpd.models.policy import FlowPolicy


class Offset(nnx.Module):
    def __init__(self, action_dim: int):
        self.offset = nnx.Param(jnp.zeros(action_dim, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Steering(Improvement):
    """Shifts the noise of every candidate by a learned offset."""

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        return jnp.zeros(view.batch.actions.shape[0], jnp.float32)

    def create_networks(self, policy: FlowPolicy, algorithm: Algorithm, critic: CriticConfig, rngs: nnx.Rngs) -> Offset:
        return Offset(policy.action_dim)

    def propose(self, networks, context, observation, noise, denoise):  # type: ignore[no-untyped-def]
        return denoise(noise + networks.improvement.offset[...])
