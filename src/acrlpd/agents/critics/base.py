"""What critics are: an ensemble of Q networks over whole action chunks, and how their values become one value."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from flax import nnx
from jax.typing import DTypeLike

from acrlpd.choice import Choice, kind_name
from acrlpd.findings import Finding, error, warning
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.image_encoder import ImageEncoder
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Features
from acrlpd.models.token_pool import TokenPool


@dataclasses.dataclass(frozen=True)
class CriticConfig(Choice, abc.ABC):
    """What every architecture has; the architecture itself is a member of this family."""

    package = "acrlpd.agents.critics"

    # Networks in the ensemble (E). More: more pessimism under "min", better disagreement, more compute.
    num_critics: Annotated[int, Ge(1)] = 10
    # How E values become one value, for targets and for selection. "min" is pessimistic, "mean" is neutral, and
    # "weighted" learns a softmax over the members.
    q_aggregation: Literal["min", "mean", "weighted"] = "min"
    # Aggregate targets over this many randomly drawn members (REDQ); None: over all. Smaller: less pessimism.
    target_subset_size: int | None = None
    # Whether critics see what the policy has seen: the tokens of its prefix.
    use_pi0_features: bool = True
    # How tokens become features. "attention": learned queries look for what the critics need, so that the critics know
    # where things are. "mean": the mean over all tokens.
    pooling: Literal["attention", "mean"] = "attention"
    # A network of the critics' own that reads the cameras, trained by the critic loss alone. "small" is a convolutional
    # network, for policies whose backbone is frozen and was never taught what the critics need.
    image_encoder: Literal["none", "small"] = "none"

    @abc.abstractmethod
    def create(
        self, *, reader: "ObservationReader", state_dim: int, chunk_dim: int, rngs: nnx.Rngs
    ) -> "CriticEnsemble":
        """A freshly initialised ensemble, which reads observations through `reader`, and the state beside it."""

    def check(self, model: PolicyConfig) -> Iterator[Finding]:
        """What is wrong with these critics beside this policy, beyond the bounds of single fields."""
        subset = self.target_subset_size
        if subset is not None and not 1 <= subset <= self.num_critics:
            yield error(f"critic.target_subset_size {subset} must lie between 1 and num_critics {self.num_critics}")
        if self.num_critics == 1 or self.num_critics > 12:
            yield warning(f"critic.num_critics {self.num_critics} is unusual; 2 to 12 is usual")
        if self.image_encoder != "none" and not model.image_keys:
            yield error(
                f"critic.image_encoder {self.image_encoder} reads the cameras of the policy, and the "
                f"{kind_name(model)} policy has no camera: set critic.image_encoder none, or give the policy cameras"
            )


class ObservationReader(nnx.Module):
    """What critics read of an observation beside its state, as features [b, dim] with zero mean and unit variance.

    All members of an ensemble share the reader, and an observation is read once for all of its candidates.
    """

    def __init__(self, config: CriticConfig, *, feature_dim: int, image_keys: tuple[str, ...], rngs: nnx.Rngs):
        """`feature_dim` is the width of the policy's tokens, 0 for a policy without tokens."""
        self.reads_features = config.use_pi0_features and feature_dim > 0
        has_pool = self.reads_features and config.pooling == "attention"
        self.pool = TokenPool(feature_dim, rngs) if has_pool else None
        self.images = ImageEncoder(image_keys, rngs) if config.image_encoder == "small" else None
        pooled = self.pool.width if self.pool is not None else feature_dim if self.reads_features else 0
        self.dim = pooled + (0 if self.images is None else self.images.width)

    def __call__(self, features: Features | None, observation: Observation) -> jax.Array:
        seen = [jnp.zeros((observation.state.shape[0], 0), jnp.float32)]
        if self.reads_features:
            if features is None:
                raise ValueError("these critics were built with policy features; no features were given")
            seen.append(standardize(features.mean() if self.pool is None else self.pool(features)))
        if self.images is not None:
            seen.append(standardize(self.images(observation)))
        return jnp.concatenate(seen, axis=-1)


class CriticEnsemble(nnx.Module):
    """E networks that value chunks. A member of the family implements `__call__`.

    All parameters outside of the reader have a leading axis of E, so that every layer is one batched matrix product.
    """

    def __init__(self, config: CriticConfig, reader: ObservationReader):
        self.config = config
        self.reader = reader
        if config.q_aggregation == "weighted":
            self.aggregation_logits = nnx.Param(jnp.zeros(config.num_critics, jnp.float32))

    @abc.abstractmethod
    def __call__(
        self,
        features: Features | None,  # of the policy; None for critics that do not read them
        observation: Observation,  # as the policy's `preprocess` returns it
        chunks: jax.Array,  # [b, n, c]
        dropout_keys: jax.Array | None = None,  # [b]; None: no dropout
    ) -> jax.Array:  # float32 [b, n, E]
        """Values of chunks. Products may be computed in the chunks' dtype, everything else in float32."""

    @property
    def member_width(self) -> int:
        """The width of the widest layer of one member."""
        return max(leaf.shape[-1] for leaf in jax.tree.leaves(nnx.state(self, _OF_MEMBERS)))

    def rank(
        self, features: Features | None, observation: Observation, chunks: jax.Array, dtype: DTypeLike
    ) -> jax.Array:
        """Values [b, n] of which only the order counts, so that products may be computed in `dtype`.

        Casting a kernel takes as long as a product with few rows, so only many rows are worth a cast.
        """
        b, n, _ = chunks.shape
        ranked = chunks.astype(dtype) if b * n > self.member_width else chunks
        return self.aggregate(self(features, observation, ranked))

    def aggregate(self, q: jax.Array) -> jax.Array:
        """One value from the values of all members, [..., E] -> [...]."""
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
        return self.aggregate(chosen)


# The parameters that have a leading axis of E.
_OF_MEMBERS = nnx.Not(nnx.PathContains("reader"))


def keep_members(params: nnx.State, members: np.ndarray) -> nnx.State:
    """The parameters of an ensemble with only some of its members, and the reader, which all members share."""
    of_members, shared = nnx.split_state(params, _OF_MEMBERS, ...)
    return nnx.merge_state(jax.tree.map(lambda x: x[members], of_members), shared)


# -- layers of all E networks at once, for use in any architecture; tuned for the kernels that run them ----------------


class EnsembleDense(nnx.Module):
    """One linear layer of every member: kernel [E, in, out]."""

    def __init__(self, e: int, dim_in: int, dim_out: int, init_scale: float, rngs: nnx.Rngs):
        init = jax.nn.initializers.variance_scaling(init_scale, "fan_avg", "uniform", batch_axis=(0,))
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
