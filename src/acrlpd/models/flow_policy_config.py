"""What the state-space flow policy is, as plain data: cheap to import, no JAX until something is built."""

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import jax

    from acrlpd.models.flow_policy import StateFlowPolicy


@dataclasses.dataclass(frozen=True)
class StateFlowPolicyConfig:
    """An MLP vector field over state and action chunk, for low-dimensional benchmarks."""

    # Compute precision; parameters are float32.
    dtype: Literal["bfloat16", "float32"] = "float32"
    # Real state and action dims: nothing is padded here.
    state_dim: int = 28
    action_dim: int = 5
    # Steps in one action chunk.
    action_horizon: int = 5
    # Hidden layers of the vector field.
    hidden_dims: tuple[int, ...] = (512, 512, 512, 512)
