"""Critics that are multi-layer perceptrons on [what the reader sees, state, flattened chunk]."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Interval, MinLen
from flax import nnx

from acrlpd.agents.critics.base import (
    CriticConfig,
    CriticEnsemble,
    EnsembleDense,
    EnsembleLayerNorm,
    ObservationReader,
    aligned_product,
    ensemble_dropout,
    ensemble_product,
)
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Features

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True)
class MLPCritics(CriticConfig):
    """The critics of the Q-chunking paper, with the policy's features beside the state."""

    # Hidden layers of each network. Wider: fits sharper values, overfits small data sooner.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512)
    # LayerNorm after the nonlinearity of every hidden layer, as in the paper's code; keeps values bounded off the data.
    # Turn off only for ablations.
    use_layer_norm: bool = True
    # Share of hidden units dropped while the critic trains; 0 disables.
    dropout_rate: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    # Nonlinearity of the hidden layers.
    activation: Literal["relu", "swish", "gelu", "tanh"] = "gelu"
    # Scale of the variance-scaling initialiser. Larger: larger initial values and disagreement.
    kernel_init_scale: Annotated[float, Gt(0)] = 1.0
    # How features and state are joined: side by side, summed after projection, or through a learned layer.
    feature_fusion_method: Literal["concat", "add", "mlp"] = "concat"

    def create(self, *, reader: ObservationReader, state_dim: int, chunk_dim: int, rngs: nnx.Rngs) -> "MLPEnsemble":
        return MLPEnsemble(self, reader, state_dim=state_dim, chunk_dim=chunk_dim, rngs=rngs)


class MLPEnsemble(CriticEnsemble):
    """E perceptrons.

    The first layer is kept as two maps, one of the observation and one of the chunk. Their sum is the usual layer on
    both, and the observation's share (thousands of features) is computed once for all candidates of that observation.
    """

    config: MLPCritics

    def __init__(
        self, config: MLPCritics, reader: ObservationReader, *, state_dim: int, chunk_dim: int, rngs: nnx.Rngs
    ):
        super().__init__(config, reader)
        e, width, scale = config.num_critics, config.hidden_dims[0], config.kernel_init_scale
        observation_dim = reader.dim + state_dim
        if reader.dim and config.feature_fusion_method != "concat":
            if config.feature_fusion_method == "add":
                self.feature_in = EnsembleDense(e, reader.dim, width, scale, rngs)
                self.state_in = EnsembleDense(e, state_dim, width, scale, rngs)
            else:
                self.fusion = EnsembleDense(e, observation_dim, width, scale, rngs)
            observation_dim = width
        both = EnsembleDense(e, observation_dim + chunk_dim, width, scale, rngs)
        self.observation_kernel = nnx.Param(both.kernel[:, :observation_dim])
        self.chunk_kernel = nnx.Param(both.kernel[:, observation_dim:])
        self.bias = nnx.Param(both.bias[...])
        self.hidden = nnx.List(
            EnsembleDense(e, dim_in, dim_out, scale, rngs)
            for dim_in, dim_out in zip(config.hidden_dims[:-1], config.hidden_dims[1:], strict=True)
        )
        if config.use_layer_norm:
            self.norms = nnx.List(EnsembleLayerNorm(e, dim) for dim in config.hidden_dims)
        self.out = EnsembleDense(e, config.hidden_dims[-1], 1, scale, rngs)

    @jax.named_scope("critic")
    def __call__(
        self,
        features: Features | None,
        observation: Observation,
        chunks: jax.Array,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        (b, n, c), e = chunks.shape, self.config.num_critics
        seen = ensemble_product(self._fuse(features, observation), self.observation_kernel[...])[:, :, None]
        x = aligned_product(chunks.reshape(b * n, c), self.chunk_kernel[...])  # [E, b * n, h]
        x = (x.reshape(e, b, n, -1) + seen).reshape(x.shape) + self.bias[:, None]
        for i in range(len(self.config.hidden_dims)):
            if i > 0:
                x = self.hidden[i - 1](x.astype(chunks.dtype))
            x = _ACTIVATIONS[self.config.activation](x)
            if self.config.use_layer_norm:
                x = self.norms[i](x)
            if dropout_keys is not None and self.config.dropout_rate > 0:
                x = ensemble_dropout(x, dropout_keys, i, self.config.dropout_rate)
        return jnp.moveaxis(self.out(x).reshape(e, b, n), 0, -1)

    def _fuse(self, features: Features | None, observation: Observation) -> jax.Array:  # [E or 1, b, d]
        seen, state = self.reader(features, observation), jnp.asarray(observation.state)
        if self.reader.dim and self.config.feature_fusion_method == "add":
            return self.feature_in(seen[None]) + self.state_in(state[None])
        both = jnp.concatenate([seen, state], axis=-1)[None]
        if not self.reader.dim or self.config.feature_fusion_method == "concat":
            return both
        return _ACTIVATIONS[self.config.activation](self.fusion(both))
