"""A Gaussian that tanh squashes into (-1, 1): the policy of SAC, and the small policies of some improvements."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from acrlpd.models.mlp import MLP

# Bounds of RLPD's log standard deviations, before the squashing.
_LOG_STD_BOUNDS = (-20.0, 2.0)


class SquashedGaussian(nnx.Module):
    """tanh(mean(x) + deviation(x) * noise), where x is a vector and all dims of the result are independent."""

    def __init__(self, dim_in: int, hidden_dims: tuple[int, ...], dim_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        *before, width = hidden_dims
        self.hidden = MLP(dim_in, tuple(before), width, activation=nnx.relu, dtype=dtype, rngs=rngs)
        self.mean_out = MLP(width, (), dim_out, dtype=dtype, rngs=rngs)
        self.log_std_out = MLP(width, (), dim_out, dtype=dtype, rngs=rngs)

    def sample(self, x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Samples [..., d] from standard normal noise [..., d], and their log density in each dim [..., d]."""
        mean, log_std = self._distribution(x)
        before = mean + jnp.exp(log_std) * noise
        return jnp.tanh(before), _log_density(before, noise, log_std)

    def log_density(self, x: jax.Array, samples: jax.Array) -> jax.Array:
        """log density [..., d] of samples [..., d], which lie strictly between -1 and 1, in each dim."""
        mean, log_std = self._distribution(x)
        before = jnp.arctanh(samples)
        return _log_density(before, (before - mean) * jnp.exp(-log_std), log_std)

    def _distribution(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and log standard deviation before the squashing."""
        x = nnx.relu(self.hidden(x))
        mean, log_std = (out(x).astype(jnp.float32) for out in (self.mean_out, self.log_std_out))
        return mean, jnp.clip(log_std, *_LOG_STD_BOUNDS)


def _log_density(before: jax.Array, noise: jax.Array, log_std: jax.Array) -> jax.Array:
    """log density of tanh(u) in each dim, for u = mean + deviation * noise.

    log(1 - tanh(u)^2) is written with softplus, because 1 - tanh(u)^2 is 0 in float32 for |u| above 9.
    """
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * jnp.log(2 * jnp.pi)
    return normal - 2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))
