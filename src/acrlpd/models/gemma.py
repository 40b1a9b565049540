"""The two-expert Gemma: one transformer whose layers hold two sets of weights that share attention.

Expert 0 (PaliGemma's language model) reads images and prompt, expert 1 (the action expert) reads state
and noisy actions. Because the prefix never attends to the suffix, the joint pass is the same as running
expert 0 alone, keeping its keys and values, and letting expert 1 attend to them; only that form exists
here, and it is what lets one prefix serve a training loss and any number of candidates.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.models import lora
from acrlpd.models.attention import shared_context_attention
from acrlpd.models.pi0_config import GemmaConfig, RematPolicy
from acrlpd.models.remat import rematerialise

_RMS_EPS = 1e-6
_ROPE_BASE = 10_000.0


@flax.struct.dataclass
class KVCache:
    """Keys (after RoPE) and values of every layer for a context that others attend to."""

    k: jax.Array  # [depth, b, s, head_dim]
    v: jax.Array  # [depth, b, s, head_dim]
    valid: jax.Array  # bool [b, s]

    @property
    def next_position(self) -> jax.Array:
        """Position of the token that follows, [b, 1]: padding does not count."""
        return jnp.sum(self.valid, axis=-1, keepdims=True, dtype=jnp.int32)

    def append(self, k: jax.Array, v: jax.Array) -> "KVCache":
        """The cache with t more tokens, all valid; k and v are [depth, b, t, head_dim]."""
        valid = jnp.ones((*self.valid.shape[:1], k.shape[2]), jnp.bool_)
        return KVCache(
            k=jnp.concatenate([self.k, k], axis=2),
            v=jnp.concatenate([self.v, v], axis=2),
            valid=jnp.concatenate([self.valid, valid], axis=1),
        )


def expert_name(name: str, index: int) -> str:
    """openpi's leaf naming: expert 1 carries the suffix _1."""
    return name if index == 0 else f"{name}_{index}"


class _Attention(nnx.Module):
    def __init__(self, experts: tuple[GemmaConfig, ...], rngs: nnx.Rngs):
        for index, c in enumerate(experts):
            heads, width, head_dim = c.num_heads, c.width, c.head_dim
            weights = {
                "q_einsum": ((heads, width, head_dim), lora.lecun_normal(batch_axes=2)),
                "kv_einsum": ((2, c.num_kv_heads, width, head_dim), lora.lecun_normal(batch_axes=3)),
                "attn_vec_einsum": (
                    (heads, head_dim, width),
                    lora.lecun_normal(batch_axes=1, in_axis=(-3, -2)),
                ),
            }
            for name, (shape, init) in weights.items():
                module = lora.Einsum(c.depth, shape, init, lora=c.lora, rngs=rngs)
                setattr(self, expert_name(name, index), module)


class _RMSNorm(nnx.Module):
    """A learned scale around 1, or for adaRMS a projection of the condition to scale, shift and gate."""

    def __init__(self, *lead: int, width: int, adaptive: bool):
        if adaptive:
            self.Dense_0 = _ZeroDense(*lead, width=width, out=3 * width)
        else:
            self.scale = nnx.Param(jnp.zeros((*lead, width), jnp.float32))


class _ZeroDense(nnx.Module):
    def __init__(self, *lead: int, width: int, out: int):
        self.kernel = nnx.Param(jnp.zeros((*lead, width, out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((*lead, out), jnp.float32))


class _Layers(nnx.Module):
    """Weights of all layers and experts, each leaf with a leading depth axis."""

    def __init__(self, experts: tuple[GemmaConfig, ...], adaptive: tuple[bool, ...], rngs: nnx.Rngs):
        self.attn = _Attention(experts, rngs)
        for index, (c, ada) in enumerate(zip(experts, adaptive, strict=True)):
            mlp = lora.FeedForward(c.depth, c.width, c.mlp_dim, lora=c.lora, rngs=rngs)
            setattr(self, expert_name("mlp", index), mlp)
            for name in ("pre_attention_norm", "pre_ffw_norm"):
                setattr(self, expert_name(name, index), _RMSNorm(c.depth, width=c.width, adaptive=ada))


class _Embedder(nnx.Module):
    def __init__(self, vocab_size: int, width: int, rngs: nnx.Rngs):
        init = nnx.initializers.normal(stddev=0.01)
        self.input_embedding = nnx.Param(init(rngs.params(), (vocab_size, width), jnp.float32))


class Gemma(nnx.Module):
    """Two experts over one attention."""

    def __init__(
        self,
        experts: tuple[GemmaConfig, GemmaConfig],
        *,
        adaptive: tuple[bool, bool],
        vocab_size: int,
        dtype: jnp.dtype,
        remat_policy: RematPolicy,
        rngs: nnx.Rngs,
    ):
        self.experts = experts
        self.dtype = dtype
        self.remat_policy = remat_policy
        self.embedder = _Embedder(vocab_size, experts[0].width, rngs)
        self.layers = _Layers(experts, adaptive, rngs)
        for index, (c, ada) in enumerate(zip(experts, adaptive, strict=True)):
            setattr(self, expert_name("final_norm", index), _RMSNorm(width=c.width, adaptive=ada))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Prompt tokens [b, l] to [b, l, width] in the compute dtype, scaled as Gemma does."""
        table = self.embedder.input_embedding[...]
        scale = jnp.sqrt(table.shape[-1]).astype(table.dtype)
        return (table[tokens] * scale).astype(self.dtype)

    def run_expert(
        self,
        index: int,
        x: jax.Array,
        positions: jax.Array,
        *,
        mask: jax.Array | None = None,
        context: KVCache | None = None,
        condition: jax.Array | None = None,
        kv_only: bool = False,
    ) -> tuple[jax.Array | None, jax.Array, jax.Array]:
        """Runs one expert's layers over n sequences per batch entry.

        x [b, n, t, width], positions [b, t], mask [b, t, t] within a sequence (None: all visible), context
        shared by the n sequences, condition [b, n, width] for adaRMS. Returns the normalised output
        [b, n, t, width], and the keys and values [depth, b, n, t, head_dim]. With `kv_only` the output is
        None and the last layer stops at its keys and values, which are all that anybody attends to.
        """
        config = self.experts[index]
        length = x.shape[2] + (0 if context is None else context.valid.shape[1])
        rope = _rope_angles(positions[:, None, :, None], length, config.head_dim)
        x = x.astype(self.dtype)
        is_last = jnp.arange(config.depth) == config.depth - 1

        def layer(x: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            weights, context_kv, last = inputs
            y, gate = rms_norm(x, weights["pre_attention_norm"], condition)
            k, v = lora.einsum("bntd,ckdh->cbntkh", y, weights["kv"], config.lora)[..., 0, :]
            k = _apply_rope(k[..., None, :], rope)[..., 0, :]

            def rest(x: jax.Array) -> jax.Array:
                shared = None if context is None else (*context_kv, context.valid)
                return _attend_and_feed(x, y, gate, k, v, weights, config, rope, shared, mask, condition)

            x = jax.lax.cond(last, lambda x: x, rest, x) if kv_only else rest(x)
            return x, (k, v)

        context_kv = None if context is None else (context.k, context.v)
        inputs = (self._expert_weights(index), context_kv, is_last)
        x, (k, v) = jax.lax.scan(rematerialise(layer, self.remat_policy), x, inputs)
        if kv_only:
            return None, k, v
        final_norm = _params(getattr(self, expert_name("final_norm", index)))
        return rms_norm(x, final_norm, condition)[0], k, v

    def _expert_weights(self, index: int) -> dict[str, dict[str, Any]]:
        layers, attn = self.layers, self.layers.attn
        return {
            "q": _params(getattr(attn, expert_name("q_einsum", index))),
            "kv": _params(getattr(attn, expert_name("kv_einsum", index))),
            "out": _params(getattr(attn, expert_name("attn_vec_einsum", index))),
            "mlp": _params(getattr(layers, expert_name("mlp", index))),
            "pre_attention_norm": _params(getattr(layers, expert_name("pre_attention_norm", index))),
            "pre_ffw_norm": _params(getattr(layers, expert_name("pre_ffw_norm", index))),
        }


def _attend_and_feed(
    x: jax.Array,
    y: jax.Array,
    gate: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    weights: dict[str, dict[str, Any]],
    config: GemmaConfig,
    rope: tuple[jax.Array, jax.Array],
    context: tuple[jax.Array, jax.Array, jax.Array] | None,
    mask: jax.Array | None,
    condition: jax.Array | None,
) -> jax.Array:
    """The rest of a layer once its keys and values are known: attention and feed-forward."""
    q = lora.einsum("bntd,gdh->bntgh", y, weights["q"], config.lora)
    q = _apply_rope(q, rope) * config.head_dim**-0.5
    attended = shared_context_attention(q, k, v, context, mask)
    x = _gated_residual(x, lora.einsum("bntgh,ghd->bntd", attended, weights["out"], config.lora), gate)
    y, gate = rms_norm(x, weights["pre_ffw_norm"], condition)
    return _gated_residual(x, lora.feed_forward(y, weights["mlp"]), gate)


def rms_norm(x: jax.Array, weights: dict[str, Any], condition: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """RMSNorm in float32; with adaRMS weights also a gate [b, n, 1, width] for the residual branch."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _RMS_EPS)
    if "scale" in weights:
        return (normed * (1 + weights["scale"].astype(jnp.float32))).astype(x.dtype), None
    assert condition is not None
    dense = weights["Dense_0"]
    modulation = condition.astype(x.dtype) @ dense["kernel"].astype(x.dtype) + dense["bias"].astype(x.dtype)
    scale, shift, gate = jnp.split(modulation[..., None, :], 3, axis=-1)
    return (normed * (1 + scale.astype(jnp.float32)) + shift.astype(jnp.float32)).astype(x.dtype), gate


def _gated_residual(x: jax.Array, y: jax.Array, gate: jax.Array | None) -> jax.Array:
    return x + y if gate is None else x + y * gate


def _rope_angles(positions: jax.Array, length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """sin and cos of the rotary angles for positions below `length`, float32 [..., head_dim / 2].

    Looked up in a constant table: at positions in the hundreds the angle's last bit shows, and XLA is free
    to turn the division into a product with a rounded reciprocal.
    """
    exponent = np.arange(head_dim // 2, dtype=np.float32) * np.float32(2 / head_dim)
    radians = np.arange(length, dtype=np.float32)[:, None] / np.float32(_ROPE_BASE) ** exponent
    table = jnp.asarray(np.stack([np.sin(radians), np.cos(radians)]))
    sin, cos = jnp.take(table, positions, axis=1, mode="clip")
    return sin, cos


def _apply_rope(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates [b, n, t, heads, head_dim]; the two halves of the head are the two coordinates."""
    sin, cos = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _params(module: nnx.Module) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
