"""Layers of all members of an ensemble at once, and how their products are kept fast.

Nothing here belongs to the algorithm: this module is about the speed of kernels.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class EnsembleDense(nnx.Module):
    """One linear layer of every member: kernel [E, in, out]."""

    def __init__(self, e: int, dim_in: int, dim_out: int, init_scale: float, rngs: nnx.Rngs):
        init = jax.nn.initializers.variance_scaling(init_scale, "fan_in", "uniform", batch_axis=(0,))
        self.kernel = nnx.Param(init(rngs.params(), (e, dim_in, dim_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((e, dim_out), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[E or 1, rows, in] -> [E, rows, out]."""
        return ensemble_product(x, self.kernel[...]) + self.bias[:, None]


class EnsembleLayerNorm(nnx.Module):
    """LayerNorm of every member."""

    def __init__(self, e: int, dim: int):
        self.scale = nnx.Param(jnp.ones((e, dim), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((e, dim), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:  # [E, rows, h]
        return standardize(x) * self.scale[:, None] + self.bias[:, None]


def ensemble_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[E or 1, rows, in] times [E, in, out], computed in x's dtype, as float32."""
    # x is broadcast first: in one product with a matrix of all members, XLA would transpose kernels and gradients.
    x = jnp.broadcast_to(x, (kernel.shape[0], *x.shape[1:]))
    product = jnp.einsum("eri,eio->ero", x, kernel.astype(x.dtype))
    if x.dtype == jnp.float32:
        return product
    # Without the barrier XLA would write the product as float32 at once, and so read and write twice as much.
    return jax.lax.optimization_barrier(product).astype(jnp.float32)


def aligned_product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Rows [r, c] times [E, c, out], padded to a multiple of 8 columns, because matrix units want aligned sizes."""
    padding = (0, -rows.shape[1] % 8)
    return ensemble_product(jnp.pad(rows, [(0, 0), padding])[None], jnp.pad(kernel, [(0, 0), padding, (0, 0)]))


def standardize(x: jax.Array) -> jax.Array:
    """Zero mean and unit variance over the last axis; both moments in one pass over x."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True) - jnp.square(mean)
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-6)


def ensemble_dropout(x: jax.Array, keys: jax.Array, layer: int, rate: float) -> jax.Array:
    """Inverted dropout on [E, b * n, h]. Each of the b samples has its own key, so micro-batches change nothing."""
    shape = (x.shape[0], x.shape[1] // keys.shape[0], x.shape[2])
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - rate, shape))(keys)
    return jnp.where(jnp.moveaxis(keep, 0, 1).reshape(x.shape), x / (1 - rate), 0.0)
