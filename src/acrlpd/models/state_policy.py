"""What the policies that read the state alone have in common: their sizes, and what they know of an observation."""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp
from annotated_types import Ge, MinLen

from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy


@dataclasses.dataclass(frozen=True)
class StatePolicyConfig(PolicyConfig):
    """A perceptron that makes whole action chunks, for low-dimensional benchmarks."""

    # Compute precision; parameters are float32.
    dtype: Literal["bfloat16", "float32"] = "float32"
    # Real state and action dims: nothing is padded here.
    state_dim: Annotated[int, Ge(1)] = 28
    action_dim: Annotated[int, Ge(1)] = 5
    # Steps in one action chunk.
    action_horizon: Annotated[int, Ge(1)] = 5
    # Hidden layers.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512, 512)


class StatePolicy(FlowPolicy):
    """Base of these policies. The critics see the state itself, so they get no features (`feature_dim` is 0)."""

    def encode(self, observation: Observation, *, features: bool = True) -> Context:
        state = jnp.asarray(observation.state)
        if state.shape[-1] != self.state_dim:
            raise ValueError(f"state must be [b, {self.state_dim}]; found {state.shape}")
        return Context(features=None, memory=state.astype(self.dtype))
