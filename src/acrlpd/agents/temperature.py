"""The temperature alpha: how sharply advantages weigh samples, and how greedily candidates are chosen."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

_VARIANCE_FLOOR = 1e-6  # keeps the entropy finite when all candidates agree
# Beyond this bound weights and choices hardly change any more, but a gradient would overflow in the end.
_MAX_LOG_ALPHA = math.log(1e6)


class TemperatureModule(nnx.Module):
    """alpha = exp(log_alpha), positive by construction."""

    def __init__(self, initial_temperature: float):
        if not (initial_temperature > 0 and math.isfinite(initial_temperature)):
            raise ValueError(f"initial_temperature must be positive; found {initial_temperature}")
        self.log_alpha = nnx.Param(jnp.asarray(math.log(initial_temperature), jnp.float32))

    def __call__(self) -> jax.Array:
        return jnp.exp(self.log_alpha[...])

    def alpha_loss(self, entropy: jax.Array, target_entropy: float) -> jax.Array:
        """Lowers alpha while the policy is more diverse than wanted, and raises alpha while it is less diverse."""
        return self() * jax.lax.stop_gradient(entropy - target_entropy)


def within_bounds(temperature_params: nnx.State) -> nnx.State:
    """Keeps alpha between 1e-6 and 1e6.

    Nothing makes the entropy of the candidates reach its target. Where the entropy stays on one side of the target, log
    alpha would move by a learning rate per update for as long as the run lasts.
    """
    return jax.tree.map(lambda log_alpha: jnp.clip(log_alpha, -_MAX_LOG_ALPHA, _MAX_LOG_ALPHA), temperature_params)


def estimate_entropy(candidates: jax.Array) -> jax.Array:
    """Entropy of one step's action from the spread of N candidates [b, N, H, a]: [b].

    The entropy is that of a Gaussian with each dimension's variance over the candidates. It is summed over the action
    dims and averaged over the steps, so that its scale is that of the target -multiplier * action_dim.
    """
    variance = jnp.var(candidates, axis=1) + _VARIANCE_FLOOR
    per_dim = 0.5 * jnp.log(2 * jnp.pi * jnp.e * variance)  # [b, H, a]
    return jnp.mean(jnp.sum(per_dim, axis=-1), axis=-1)
