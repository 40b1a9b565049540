"""The critics: an ensemble of Q networks over whole action chunks.

All members are computed together: every parameter has a leading ensemble axis and every layer is one
batched matrix product.
"""

import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from acrlpd.agents.hyperparams import CriticConfig
from acrlpd.models.observation import Array

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
}


class CriticEnsemble(nnx.Module):
    """E multi-layer perceptrons on [policy features, state, flattened chunk].

    The first layer is kept as two maps, one of the observation and one of the chunk: their sum is the
    usual layer on both, and the observation's share (thousands of features) is computed once for all
    candidates of that observation.
    """

    def __init__(self, config: CriticConfig, *, feature_dim: int, state_dim: int, chunk_dim: int, rngs: nnx.Rngs):
        self.config = config
        self.feature_dim = feature_dim if config.use_pi0_features else 0
        e, width = config.num_critics, config.hidden_dims[0]
        observation_dim = self.feature_dim + state_dim
        if self.feature_dim and config.feature_fusion_method != "concat":
            if config.feature_fusion_method == "add":
                self.feature_in = _Dense(e, self.feature_dim, width, config, rngs)
                self.state_in = _Dense(e, state_dim, width, config, rngs)
            else:
                self.fusion = _Dense(e, observation_dim, width, config, rngs)
            observation_dim = width
        both = _Dense(e, observation_dim + chunk_dim, width, config, rngs)
        self.observation_kernel = nnx.Param(both.kernel[:, :observation_dim])
        self.chunk_kernel = nnx.Param(both.kernel[:, observation_dim:])
        self.bias = nnx.Param(both.bias[...])
        self.hidden = nnx.List(
            _Dense(e, dim_in, dim_out, config, rngs)
            for dim_in, dim_out in zip(config.hidden_dims[:-1], config.hidden_dims[1:], strict=True)
        )
        if config.use_layer_norm:
            self.norms = nnx.List(_LayerNorm(e, dim) for dim in config.hidden_dims)
        self.out = _Dense(e, config.hidden_dims[-1], 1, config, rngs)
        if config.q_aggregation == "weighted":
            self.aggregation_logits = nnx.Param(jnp.zeros(e, jnp.float32))

    @jax.named_scope("critic")
    def __call__(
        self,
        features: jax.Array | None,  # [b, d]
        state: Array,  # [b, s]
        chunks: jax.Array,  # [b, n, c]
        dropout_keys: jax.Array | None = None,  # [b]; None: no dropout
    ) -> jax.Array:  # float32 [b, n, E]
        """Values of chunks. Products are computed in the chunks' dtype, everything else in float32."""
        activation = _ACTIVATIONS[self.config.activation]
        observation = _product(self._fuse(features, state), self.observation_kernel[...])[:, :, None]  # [E, b, 1, h]
        (b, n, c), e = chunks.shape, self.config.num_critics
        # Padded, because matrix units want aligned sizes.
        rows = jnp.pad(chunks.reshape(b * n, c), [(0, 0), (0, -c % 8)])
        x = _product(rows[None], jnp.pad(self.chunk_kernel[...], [(0, 0), (0, -c % 8), (0, 0)]))  # [E, b * n, h]
        x = (x.reshape(e, b, n, -1) + observation).reshape(x.shape) + self.bias[:, None]
        for i in range(len(self.config.hidden_dims)):
            if i > 0:
                x = self.hidden[i - 1](x.astype(chunks.dtype))
            if self.config.use_layer_norm:
                x = self.norms[i](x)
            x = activation(x)
            if dropout_keys is not None and self.config.dropout_rate > 0:
                x = _dropout(x, dropout_keys, i, self.config.dropout_rate)
        return jnp.moveaxis(self.out(x).reshape(e, b, n), 0, -1)

    def rank(self, features: jax.Array | None, state: Array, chunks: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Values [b, n] of which only the order counts, so products may be computed in `dtype`.

        Casting a kernel takes as long as a product with few rows, so only many rows are worth it.
        """
        b, n, _ = chunks.shape
        ranked = chunks.astype(dtype) if b * n > self.config.hidden_dims[0] else chunks
        return self.aggregate(self(features, state, ranked))

    def aggregate(self, q: jax.Array) -> jax.Array:
        """One value from those of all members, [..., E] -> [...]."""
        if self.config.q_aggregation == "min":
            return jnp.min(q, axis=-1)
        if self.config.q_aggregation == "mean":
            return jnp.mean(q, axis=-1)
        return q @ jax.nn.softmax(self.aggregation_logits[...])

    def aggregate_target(self, q: jax.Array, rng: jax.Array) -> jax.Array:
        """As `aggregate`, over `target_subset_size` members drawn anew at every update (REDQ)."""
        size = self.config.target_subset_size
        if size is None:
            return self.aggregate(q)
        members = jax.random.choice(rng, q.shape[-1], (size,), replace=False)
        chosen = q[..., members]
        if self.config.q_aggregation == "weighted":
            return chosen @ jax.nn.softmax(self.aggregation_logits[members])
        return jnp.min(chosen, axis=-1) if self.config.q_aggregation == "min" else jnp.mean(chosen, axis=-1)

    def _fuse(self, features: jax.Array | None, state: Array) -> jax.Array:  # [E or 1, b, d]
        if not self.feature_dim:
            return jnp.asarray(state)[None]
        if features is None:
            raise ValueError("this critic was built with policy features; none were given")
        features = _standardize(features)
        if self.config.feature_fusion_method == "concat":
            return jnp.concatenate([features, state], axis=-1)[None]
        if self.config.feature_fusion_method == "add":
            return self.feature_in(features[None]) + self.state_in(jnp.asarray(state)[None])
        both = jnp.concatenate([features, state], axis=-1)
        return _ACTIVATIONS[self.config.activation](self.fusion(both[None]))


class _Dense(nnx.Module):
    """One linear layer of every member: kernel [E, in, out]."""

    def __init__(self, e: int, dim_in: int, dim_out: int, config: CriticConfig, rngs: nnx.Rngs):
        init = jax.nn.initializers.variance_scaling(config.kernel_init_scale, "fan_in", "uniform", batch_axis=(0,))
        self.kernel = nnx.Param(init(rngs.params(), (e, dim_in, dim_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((e, dim_out), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[E or 1, rows, in] -> [E, rows, out]."""
        return _product(x, self.kernel[...]) + self.bias[:, None]


class _LayerNorm(nnx.Module):
    def __init__(self, e: int, dim: int):
        self.scale = nnx.Param(jnp.ones((e, dim), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((e, dim), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:  # [E, rows, h]
        return _standardize(x) * self.scale[:, None] + self.bias[:, None]


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[E or 1, rows, in] times [E, in, out], computed in x's dtype, as float32."""
    # Broadcast first: as one product with a matrix of all members, XLA would transpose kernels and gradients.
    x = jnp.broadcast_to(x, (kernel.shape[0], *x.shape[1:]))
    product = jnp.einsum("eri,eio->ero", x, kernel.astype(x.dtype))
    if x.dtype == jnp.float32:
        return product
    # Without the barrier XLA would write it as float32 at once, and so read and write twice as much.
    return jax.lax.optimization_barrier(product).astype(jnp.float32)


def _standardize(x: jax.Array) -> jax.Array:
    """Zero mean and unit variance over the last axis; both moments in one pass over x."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True) - jnp.square(mean)
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-6)


def _dropout(x: jax.Array, keys: jax.Array, layer: int, rate: float) -> jax.Array:
    """Inverted dropout on [E, b * n, h]; each of the b samples has its own key: micro-batches change nothing."""
    shape = (x.shape[0], x.shape[1] // keys.shape[0], x.shape[2])
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - rate, shape))(keys)
    return jnp.where(jnp.moveaxis(keep, 0, 1).reshape(x.shape), x / (1 - rate), 0.0)


class CriticNetworks(flax.struct.PyTreeNode):
    """Online and target parameters of one ensemble: an immutable pytree."""

    online: nnx.State
    target: nnx.State
    network: nnx.GraphDef = flax.struct.field(pytree_node=False)

    @property
    def online_ensemble(self) -> CriticEnsemble:
        return nnx.merge(self.network, self.online)

    @property
    def target_ensemble(self) -> CriticEnsemble:
        return nnx.merge(self.network, self.target)

    @property
    def uses_features(self) -> bool:
        """Whether the policy's features are worth pooling for these critics."""
        return self.online_ensemble.feature_dim > 0

    def soft_update_target_networks(self, tau: float | jax.Array) -> "CriticNetworks":
        """target <- (1 - tau) * target + tau * online."""
        target = jax.tree.map(lambda old, new: (1 - tau) * old + tau * new, self.target, self.online)
        return self.replace(target=target)


def create_critic_networks(
    config: CriticConfig, rng: jax.Array, *, feature_dim: int, state_dim: int, chunk_dim: int
) -> CriticNetworks:
    """Fresh critics whose target starts as a copy of the online ensemble."""
    _check(config)
    ensemble = CriticEnsemble(
        config, feature_dim=feature_dim, state_dim=state_dim, chunk_dim=chunk_dim, rngs=nnx.Rngs(rng)
    )
    network, online = nnx.split(ensemble)
    return CriticNetworks(online=online, target=jax.tree.map(jnp.copy, online), network=network)


def _check(config: CriticConfig) -> None:
    if not config.hidden_dims:
        raise ValueError("critic.hidden_dims must name at least one layer width")
    if not 0 <= config.dropout_rate < 1 or not math.isfinite(config.dropout_rate):
        raise ValueError(f"critic.dropout_rate must be in [0, 1); found {config.dropout_rate}")
    size = config.target_subset_size
    if size is not None and not 1 <= size <= config.num_critics:
        raise ValueError(
            f"critic.target_subset_size must be between 1 and num_critics = {config.num_critics}; found {size}"
        )
