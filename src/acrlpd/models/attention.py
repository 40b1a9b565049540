"""Attention: over one sequence, and of many action chunks over one shared context."""

import jax
import jax.numpy as jnp

# openpi's finite stand-in for minus infinity: a row with no visible key becomes uniform, not NaN.
_MASKED = -2.3819763e38


def full_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Unmasked multi-head attention on [b, t, heads, head_dim]; softmax in the compute dtype."""
    if _has_fused_kernel(q):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), v)


def shared_context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: tuple[jax.Array, jax.Array, jax.Array] | None,
    mask: jax.Array | None,
) -> jax.Array:
    """Multi-query attention of n sequences per batch entry, each over itself and one shared context.

    q [b, n, t, heads, h] (already scaled), k and v [b, n, t, h], context (k, v [b, s, h], valid [b, s]),
    mask [b, t, t] over the sequence itself or None where all of it is visible. Softmax in float32. The
    context is never repeated n times: its keys and values enter as they are.
    """
    if context is None and mask is not None and q.shape[1] == 1 and _has_fused_kernel(q):
        out = jax.nn.dot_product_attention(
            q[:, 0], k[:, 0, :, None], v[:, 0, :, None], mask=mask[:, None], scale=1.0, implementation="cudnn"
        )
        return out[:, None]
    own = _einsum_f32("bntgh,bnsh->bngts", q, k)
    if mask is not None:
        own = jnp.where(mask[:, None, None], own, _MASKED)
    if context is None:
        probs = jax.nn.softmax(own, axis=-1).astype(v.dtype)
        return jnp.einsum("bngts,bnsh->bntgh", probs, v)
    context_k, context_v, context_valid = context
    shared = _einsum_f32("bntgh,bsh->bngts", q, context_k)
    shared = jnp.where(context_valid[:, None, None, None, :], shared, _MASKED)
    probs = jax.nn.softmax(jnp.concatenate([shared, own], axis=-1), axis=-1).astype(v.dtype)
    size = context_k.shape[1]
    out = _einsum_f32("bngts,bsh->bntgh", probs[..., :size], context_v)
    out += _einsum_f32("bngts,bnsh->bntgh", probs[..., size:], v)
    return out.astype(v.dtype)


def _has_fused_kernel(q: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes these operands."""
    return jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 and q.shape[-1] % 8 == 0


def _einsum_f32(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum that accumulates and returns float32, whatever the operands are."""
    if jax.default_backend() == "cpu":  # XLA lacks some bfloat16 x bfloat16 -> float32 products there
        return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
