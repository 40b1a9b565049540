"""What critics are: an ensemble of Q networks over whole action chunks, and how their values become one value."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge
from flax import nnx
from jax.typing import DTypeLike

from acrlpd.choice import Choice
from acrlpd.findings import Finding, error, warning
from acrlpd.models.observation import Array


@dataclasses.dataclass(frozen=True)
class CriticConfig(Choice, abc.ABC):
    """What every architecture has; the architecture itself is a member of this family."""

    package = "acrlpd.agents.critics"

    # Networks in the ensemble (E). More: more pessimism under "min", better disagreement, more compute.
    num_critics: Annotated[int, Ge(1)] = 10
    # How E values become one, for targets and for selection. "min" is pessimistic, "mean" is not,
    # "weighted" learns a softmax over the members.
    q_aggregation: Literal["min", "mean", "weighted"] = "min"
    # Aggregate targets over this many randomly drawn members (REDQ); None: over all. Smaller: less pessimism.
    target_subset_size: int | None = None
    # Whether critics see the policy's pooled prefix features; off: the state alone (cheap, blind to images).
    use_pi0_features: bool = True

    @abc.abstractmethod
    def create(self, *, feature_dim: int, state_dim: int, chunk_dim: int, rngs: nnx.Rngs) -> "CriticEnsemble":
        """A freshly initialised ensemble."""

    def check(self) -> Iterator[Finding]:
        """What is wrong with these critics, beyond the bounds of single fields."""
        subset = self.target_subset_size
        if subset is not None and not 1 <= subset <= self.num_critics:
            yield error(f"critic.target_subset_size {subset} must lie between 1 and num_critics {self.num_critics}")
        if self.num_critics == 1 or self.num_critics > 12:
            yield warning(f"critic.num_critics {self.num_critics} is unusual; 2 to 12 are tried")


class CriticEnsemble(nnx.Module):
    """E networks that value chunks. A member of the family implements `__call__`.

    All parameters have a leading axis of E, so that every layer is one batched matrix product.
    """

    def __init__(self, config: CriticConfig, *, feature_dim: int):
        self.config = config
        self.feature_dim = feature_dim if config.use_pi0_features else 0
        if config.q_aggregation == "weighted":
            self.aggregation_logits = nnx.Param(jnp.zeros(config.num_critics, jnp.float32))

    @abc.abstractmethod
    def __call__(
        self,
        features: jax.Array | None,  # [b, d]; None for critics without features
        state: Array,  # [b, s]
        chunks: jax.Array,  # [b, n, c]
        dropout_keys: jax.Array | None = None,  # [b]; None: no dropout
    ) -> jax.Array:  # float32 [b, n, E]
        """Values of chunks. Products may be computed in the chunks' dtype, everything else in float32."""

    def rank(self, features: jax.Array | None, state: Array, chunks: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Values [b, n] of which only the order counts, so that products may be computed in `dtype`.

        Casting a kernel takes as long as a product with few rows, so only many rows are worth a cast.
        """
        b, n, _ = chunks.shape
        widest_layer = max(leaf.shape[-1] for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        ranked = chunks.astype(dtype) if b * n > widest_layer else chunks
        return self.aggregate(self(features, state, ranked))

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
