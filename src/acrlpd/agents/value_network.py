"""A network over observations alone, for values that are judged without a chunk."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.critics.base import EnsembleDense, EnsembleLayerNorm, ObservationReader
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Features


class ValueNetwork(nnx.Module):
    """A perceptron with the layers of the critics, which reads observations as the critics do."""

    def __init__(
        self,
        hidden_dims: tuple[int, ...],
        reader: ObservationReader,
        state_dim: int,
        num_outputs: int,
        rngs: nnx.Rngs,
    ):
        self.reader = reader
        dims = (reader.dim + state_dim, *hidden_dims)
        self.hidden = nnx.List(EnsembleDense(1, before, after, 1.0, rngs) for before, after in itertools.pairwise(dims))
        self.norms = nnx.List(EnsembleLayerNorm(1, dim) for dim in hidden_dims)
        self.out = EnsembleDense(1, dims[-1], num_outputs, 1.0, rngs)

    @jax.named_scope("critic")
    def __call__(self, features: Features | None, observation: Observation) -> jax.Array:
        """Outputs [b, num_outputs] for observations."""
        x = jnp.concatenate([self.reader(features, observation), observation.state], axis=-1)[None]
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(jax.nn.gelu(layer(x)))
        return self.out(x)[0]
