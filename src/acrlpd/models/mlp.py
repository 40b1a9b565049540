"""A multi-layer perceptron with the initial values of the Q-chunking paper's code."""

import itertools
from collections.abc import Callable

import jax
from flax import nnx
from jax.typing import DTypeLike


class MLP(nnx.Module):
    """Linear layers with a nonlinearity between them; the last layer has none. Parameters are float32."""

    def __init__(
        self,
        dim_in: int,
        hidden_dims: tuple[int, ...],
        dim_out: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = nnx.gelu,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        init = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        dims = (dim_in, *hidden_dims, dim_out)
        self.activation = activation
        self.layers = nnx.List(
            nnx.Linear(before, after, kernel_init=init, dtype=dtype, rngs=rngs)
            for before, after in itertools.pairwise(dims)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)
