"""openpi's AdamW: the decay is on every parameter."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Interval

from acrlpd.agents.optimizers.base import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class AdamW(OptimizerConfig):
    """AdamW after clipping by global norm; moments are float32."""

    # Decay of the first moment. Higher: smoother, slower to turn.
    b1: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    # Decay of the second moment. openpi uses 0.95; the usual 0.999 reacts slower to gradient scale.
    b2: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    # Added to the root of the second moment.
    eps: Annotated[float, Gt(0)] = 1e-8
    # Pull of every weight towards zero, times the learning rate.
    weight_decay: Annotated[float, Ge(0)] = 1e-10
    # Gradients with a larger global norm are scaled down to this norm. Lower: more robust, slower.
    clip_gradient_norm: Annotated[float, Gt(0)] = 1.0

    stands_still: ClassVar[bool] = True

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        return _scale_by_adam(self), optax.add_decayed_weights(self.weight_decay)


def _scale_by_adam(config: AdamW) -> optax.GradientTransformationExtraArgs:
    """optax's Adam with optax's state, which does not change where `enabled` is False."""

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None, *, enabled: jax.Array | bool = True, **_: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        def average(decay: float, old: Any, new: Any) -> Any:
            keep, add = jnp.where(enabled, decay, 1.0), jnp.where(enabled, 1 - decay, 0.0)
            return jax.tree.map(lambda o, n: keep * o + add * jnp.where(enabled, n, 0.0), old, new)

        mu = average(config.b1, state.mu, grads)
        nu = average(config.b2, state.nu, jax.tree.map(jnp.square, grads))
        count = optax.safe_increment(state.count)
        first, second = 1 - config.b1**count, 1 - config.b2**count
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + config.eps), mu, nu)
        return updates, optax.ScaleByAdamState(jnp.where(enabled, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)
