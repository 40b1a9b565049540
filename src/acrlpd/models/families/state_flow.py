"""What the state-space flow policy is, as plain data: cheap to import, no JAX until something is built."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from acrlpd.models.families.base import PolicyConfig

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from acrlpd.models.flow_policy import StateFlowPolicy


@dataclasses.dataclass(frozen=True)
class StateFlowPolicyConfig(PolicyConfig):
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

    def __post_init__(self) -> None:
        for field in ("state_dim", "action_dim", "action_horizon"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1; found {getattr(self, field)}")
        if not self.hidden_dims or min(self.hidden_dims) < 1:
            raise ValueError(f"hidden_dims must name at least one layer width; found {self.hidden_dims}")

    def create(self, rng: "jax.Array") -> "StateFlowPolicy":
        """A freshly initialised policy."""
        from flax import nnx

        from acrlpd.models.flow_policy import StateFlowPolicy

        return StateFlowPolicy(self, rngs=nnx.Rngs(rng))

    def get_freeze_filter(self, *, freeze_pi0_backbone: bool = False) -> "nnx.filterlib.Filter":
        """Selects the parameters that do not train: none, there is no backbone here to freeze."""
        from flax import nnx

        if freeze_pi0_backbone:
            raise ValueError("freeze_pi0_backbone needs a pi0 model; the state-space policy has no backbone")
        return nnx.Nothing()
