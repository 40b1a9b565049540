"""The state-space flow policy as plain data: cheap to import, no JAX until the network is made."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, MinLen

from acrlpd.models.families.base import PolicyConfig, WorkingMemory

if TYPE_CHECKING:
    import jax

    from acrlpd.models.state_flow import StateFlowPolicy


@dataclasses.dataclass(frozen=True)
class StateFlowPolicyConfig(PolicyConfig):
    """An MLP vector field over state and action chunk, for low-dimensional benchmarks."""

    # Compute precision; parameters are float32.
    dtype: Literal["bfloat16", "float32"] = "float32"
    # Real state and action dims: nothing is padded here.
    state_dim: Annotated[int, Ge(1)] = 28
    action_dim: Annotated[int, Ge(1)] = 5
    # Steps in one action chunk.
    action_horizon: Annotated[int, Ge(1)] = 5
    # Hidden layers of the vector field.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512, 512)

    def create(self, rng: "jax.Array") -> "StateFlowPolicy":
        """A freshly initialised policy."""
        from flax import nnx

        from acrlpd.models.state_flow import StateFlowPolicy

        return StateFlowPolicy(self, rngs=nnx.Rngs(rng))

    def working_memory(self, *, freeze_pi0_backbone: bool) -> WorkingMemory:
        """Two arrays of each hidden layer for the backward pass, two of the widest layer for a candidate."""
        size = {"bfloat16": 2, "float32": 4}[self.dtype]
        widest = 2.0 * max(self.hidden_dims) * size
        return WorkingMemory(
            kept=2.0 * sum(self.hidden_dims) * size,
            layer=widest,
            context=self.hidden_dims[0] * size,
            candidate=widest,
        )
