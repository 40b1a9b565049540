"""What SigLIP's and Gemma's layers share: weights, rematerialisation, placement of activations on a mesh, attention.

Sequences that can be padded come with their valid tokens first and a length: fused attention kernels take a length
without materialising a mask.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from acrlpd.files import is_whole_number
from acrlpd.models.paligemma_sizes import RematPolicy

# openpi's finite stand-in for minus infinity: a row with no visible key becomes uniform, not NaN.
_MASKED = -2.3819763e38
# Layers that are narrower belong to a small network.
_SMALL_WIDTH = 512


# -- weights, rematerialisation and placement


def param_dict(module: nnx.Module) -> dict[str, Any]:
    """The parameters of a module as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def rematerialise(layer: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """Wraps the body of a scan over layers, so that the backward pass computes again what `policy` does not keep."""
    if policy == "none":
        return layer
    saveable = {"full": jax.checkpoint_policies.nothing_saveable, "dots": _products_saveable}[policy]
    return jax.checkpoint(layer, policy=saveable, prevent_cse=False)  # a scan needs no barriers


def scan_layers(layer: Callable[..., Any], x: jax.Array, inputs: Any, policy: RematPolicy) -> tuple[jax.Array, Any]:
    """Runs x [..., width] through layers of one shape, whose weights and other inputs are stacked.

    A loop keeps the program of a large network small. A small network that keeps its activations spends much of its
    time on copying them into and out of the arrays of the loop, so its layers are written out one after another.
    """
    is_written_out = policy == "none" and x.shape[-1] < _SMALL_WIDTH
    return jax.lax.scan(rematerialise(layer, policy), x, inputs, unroll=is_written_out)


def _products_saveable(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keeps products with weights, and what a fused attention kernel returns: both are dear to recompute."""
    if "dot_product_attention" in primitive.name:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


def split_by_sample(x: jax.Array) -> jax.Array:
    """x [b, ...] with its first axis over all devices of the mesh that `jax.set_mesh` has set; without a mesh, x.

    Sharded weights and a sharded batch leave the compiler a choice: gather a layer's weights, or gather the batch and
    compute with parts of the weights. For large batches the second costs far more, so layers say that their
    activations stay where their samples are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(mesh.axis_names))


def weights_are_split() -> bool:
    """Whether devices of the current mesh share one copy of the weights: openpi's axis `fsdp`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape.get("fsdp", 1) > 1


# -- attention


def full_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Unmasked multi-head attention on [b, t, heads, head_dim]; logits in the compute dtype."""
    if _has_fused_kernel(q):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    # Some compilers would add up a bfloat16 softmax in bfloat16.
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", probs, v)


def multi_query_attention(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attention of q [b, t, heads, h] (already scaled) over the first `length` [b] of k and v [b, s, h]."""
    if _has_fused_kernel(q) and q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0:  # the kernel's gradient needs even lengths
        queries = jnp.full_like(length, q.shape[1])
        return jax.nn.dot_product_attention(
            q,
            k[:, :, None],
            v[:, :, None],
            scale=1.0,
            query_seq_lengths=queries,
            key_value_seq_lengths=length,
            implementation="cudnn",
        )
    return _masked_attention(q, k, v, length)


def shared_context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: tuple[jax.Array, jax.Array, jax.Array],
    visible: jax.Array | None = None,
) -> jax.Array:
    """Attention of n chunks per batch entry, each over itself and one shared context.

    q [b, n, t, heads, h] (already scaled), k and v [b, n, s', h], context: k and v [b, s, h] and length [b].
    The context is never repeated n times: its keys and values enter as they are. `visible` [t, s'] says which keys of
    its chunk a query sees; None: all of them.
    """
    context_k, context_v, length = context
    if q.shape[1] == 1 and visible is None:
        k, v = (_join_tokens(pair) for pair in ((k[:, 0], context_k), (v[:, 0], context_v)))
        # Few queries over many keys: plain products are faster than a flash kernel here.
        return _masked_attention(q[:, 0], k, v, length + q.shape[2])[:, None]
    own = _einsum_f32("bntgh,bnsh->bntgs", q, k)
    if visible is not None:
        own = jnp.where(visible[:, None], own, _MASKED)
    shared = _mask_padding(_einsum_f32("bntgh,bsh->bntgs", q, context_k), length)
    # One softmax over both, in two parts: joining the logits would copy them.
    highest = jnp.maximum(jnp.max(own, axis=-1, keepdims=True), jnp.max(shared, axis=-1, keepdims=True))
    own, shared = (jnp.exp(logits - jax.lax.stop_gradient(highest)) for logits in (own, shared))
    total = jnp.sum(own, axis=-1, keepdims=True) + jnp.sum(shared, axis=-1, keepdims=True)
    out = _einsum_f32("bntgs,bsh->bntgh", shared.astype(v.dtype), context_v)
    out += _einsum_f32("bntgs,bnsh->bntgh", own.astype(v.dtype), v)
    return (out / total).astype(v.dtype)


def _masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    # All heads share keys and values, so tokens and heads are one axis to a product: nothing is transposed.
    logits = _mask_padding(_einsum_f32("btgh,bsh->btgs", q, k), length)
    probs = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return _einsum_f32("btgs,bsh->btgh", probs, v).astype(v.dtype)


def _join_tokens(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Two sequences [b, t, h] one after the other; long ones are padded to a length that suits matrix units."""
    joined = jnp.concatenate(parts, axis=1)
    if joined.shape[1] < 64:
        return joined
    return jnp.pad(joined, [(0, 0), (0, -joined.shape[1] % 64), (0, 0)])


def _mask_padding(logits: jax.Array, length: jax.Array) -> jax.Array:
    """Hides the keys (last axis) from `length` [b] on."""
    visible = jnp.arange(logits.shape[-1]) < length.reshape(-1, *[1] * (logits.ndim - 1))
    return jnp.where(visible, logits, _MASKED)


def _has_fused_kernel(q: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes these operands on the GPU of this process."""
    if jax.default_backend() != "gpu" or q.dtype != jnp.bfloat16 or q.shape[-1] % 8:
        return False
    return q.shape[-1] <= widest_fused_head(jax.local_devices()[0].compute_capability)


def widest_fused_head(compute_capability: str) -> int:
    """Largest head_dim of cuDNN's flash attention, gradient included; 0 where the GPU has no such kernel.

    Gemma's heads have 256. JAX refuses them on GPUs before Hopper; on GPUs after Hopper the gradient needs a later
    cuDNN than JAX asks for.
    """
    generation = compute_capability.partition(".")[0]
    if not is_whole_number(generation) or int(generation) < 8:  # AMD's GPUs have names, such as gfx942
        return 0
    return 256 if generation == "9" else 128


def _einsum_f32(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum that accumulates and returns float32, whatever the operands are."""
    if jax.default_backend() == "cpu":  # XLA lacks some of these products there, or adds them up in bfloat16
        return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
