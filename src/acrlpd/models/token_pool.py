"""Attention pooling: learned queries turn any number of tokens into a fixed number of features."""

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.layers import multi_query_attention
from acrlpd.models.policy import Features

# Queries, and features that each query yields. A scene has a few things that matter, seen by up to three cameras.
NUM_QUERIES = 8
QUERY_WIDTH = 64


class TokenPool(nnx.Module):
    """Multi-head attention of learned queries, one for each head, over standardised tokens.

    A mean over tokens says what is there, but not which token has seen it. Tokens carry their place in the image, so a
    query that finds a thing also finds where the thing is.

    No projection sees single tokens, so an observation of 800 tokens costs little memory and arithmetic. The key
    projection of a learned query is part of that query. The value projection is linear, so it is applied to the
    weighted mean of the tokens.
    """

    def __init__(self, dim: int, rngs: nnx.Rngs):
        self.queries = nnx.Param(jax.random.normal(rngs.params(), (NUM_QUERIES, dim)))
        init = jax.nn.initializers.lecun_normal(batch_axis=(0,))
        self.values = nnx.Param(init(rngs.params(), (NUM_QUERIES, dim, QUERY_WIDTH)))

    @property
    def width(self) -> int:
        return NUM_QUERIES * QUERY_WIDTH

    def __call__(self, features: Features) -> jax.Array:  # float32 [b, width]
        dtype, (b, _, dim) = features.tokens.dtype, features.tokens.shape
        tokens = jax.nn.standardize(features.tokens.astype(jnp.float32), epsilon=1e-6).astype(dtype)
        queries = (self.queries[...] / dim**0.5).astype(dtype)
        queries = jnp.broadcast_to(queries, (b, 1, NUM_QUERIES, dim))
        found = multi_query_attention(queries, tokens, tokens, features.length)[:, 0]  # [b, queries, dim]
        return jnp.einsum("bqd,qdw->bqw", found.astype(jnp.float32), self.values[...]).reshape(b, self.width)
