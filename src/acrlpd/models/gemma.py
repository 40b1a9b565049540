"""The two-expert Gemma: one transformer whose layers hold two sets of weights that share attention.

Expert 0 (PaliGemma's language model) reads images and prompt, expert 1 (the action expert) reads state
and noisy actions. The prefix never attends to the suffix. The joint pass is therefore the same as running
expert 0 alone, keeping its keys and values, and letting expert 1 attend to them. Only this form exists
here: one prefix then serves a training loss and any number of candidates.

pi0-FAST has expert 0 alone, which goes on to write action tokens after the prefix, each seeing those before it.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.models import lora
from acrlpd.models.layers import (
    multi_query_attention,
    param_dict,
    scan_layers,
    shared_context_attention,
    split_by_sample,
)
from acrlpd.models.paligemma_sizes import BackboneConfig, GemmaConfig

LayerWeights = dict[str, Any]

_RMS_EPS = 1e-6
_ROPE_BASE = 10_000.0


@flax.struct.dataclass
class KVCache:
    """Keys (after RoPE) and values of every layer for a context that others attend to, valid tokens first."""

    k: jax.Array  # [depth, b, s, head_dim]
    v: jax.Array  # [depth, b, s, head_dim]
    length: jax.Array  # int32 [b]: how many of the s tokens are valid

    def prepend(self, k: jax.Array, v: jax.Array) -> "KVCache":
        """The cache with t more valid tokens, k and v [depth, b, t, head_dim]; their order does not matter."""
        return KVCache(
            k=jnp.concatenate([k, self.k], axis=2),
            v=jnp.concatenate([v, self.v], axis=2),
            length=self.length + k.shape[2],
        )

    def pad_to_multiple(self, size: int) -> "KVCache":
        """The cache with invalid tokens at its end: matrix units want aligned lengths."""
        padding = [(0, 0), (0, 0), (0, -self.k.shape[2] % size), (0, 0)]
        return KVCache(k=jnp.pad(self.k, padding), v=jnp.pad(self.v, padding), length=self.length)


def expert_name(name: str, index: int) -> str:
    """openpi's leaf naming: expert 1 carries the suffix _1."""
    return name if index == 0 else f"{name}_{index}"


def _create_norm(*lead: int, width: int, adaptive: bool) -> nnx.Dict:
    """A learned scale around 1, or for adaRMS a projection of the condition to scale, shift and gate."""
    if not adaptive:
        return nnx.Dict(scale=nnx.Param(jnp.zeros((*lead, width), jnp.float32)))
    kernel, bias = jnp.zeros((*lead, width, 3 * width), jnp.float32), jnp.zeros((*lead, 3 * width), jnp.float32)
    return nnx.Dict(Dense_0=nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(bias)))


def _create_layers(experts: tuple[GemmaConfig, ...], adaptive: tuple[bool, ...], rngs: nnx.Rngs) -> nnx.Dict:
    """Weights of all layers and experts under openpi's names, each leaf with a leading depth axis."""
    layers: nnx.Dict = nnx.Dict(attn=nnx.Dict())
    for index, c in enumerate(experts):
        for name, shape, init in (
            ("q_einsum", (c.num_heads, c.width, c.head_dim), lora.lecun_normal(batch_axes=2)),
            ("kv_einsum", (2, 1, c.width, c.head_dim), lora.lecun_normal(batch_axes=3)),
            ("attn_vec_einsum", (c.num_heads, c.head_dim, c.width), lora.lecun_normal(batch_axes=1, in_axis=(-3, -2))),
        ):
            layers.attn[expert_name(name, index)] = lora.Einsum(c.depth, shape, init, lora=c.lora, rngs=rngs)
    for index, (c, ada) in enumerate(zip(experts, adaptive, strict=True)):
        layers[expert_name("mlp", index)] = lora.FeedForward(c.depth, c.width, c.mlp_dim, lora=c.lora, rngs=rngs)
        for name in ("pre_attention_norm", "pre_ffw_norm"):
            layers[expert_name(name, index)] = _create_norm(c.depth, width=c.width, adaptive=ada)
    return layers


class Gemma(nnx.Module):
    """One or two experts over one attention."""

    def __init__(self, config: BackboneConfig, rngs: nnx.Rngs):
        self.experts = config.experts
        self.dtype = jnp.dtype(config.dtype)
        self.remat_policy = config.remat_policy
        init = nnx.initializers.normal(stddev=0.01)
        table = init(rngs.params(), (config.vocab_size, config.experts[0].width), jnp.float32)
        self.embedder = nnx.Dict(input_embedding=nnx.Param(table))
        self.layers = _create_layers(config.experts, config.adaptive_experts, rngs)
        norms = [
            _create_norm(width=expert.width, adaptive=adaptive)
            for expert, adaptive in zip(config.experts, config.adaptive_experts, strict=True)
        ]
        self.final_norm = norms[0]
        if len(norms) > 1:
            self.final_norm_1 = norms[1]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Prompt tokens [b, l] to [b, l, width] in the compute dtype, scaled as Gemma does."""
        table = self.embedder.input_embedding[...]
        scale = jnp.sqrt(table.shape[-1]).astype(table.dtype)
        return split_by_sample((table[tokens] * scale).astype(self.dtype))

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores [..., vocabulary] of the token that follows each normalised output x [..., width], float32."""
        return jnp.dot(x, self.embedder.input_embedding[...].T, preferred_element_type=jnp.float32)

    def run_prefix(
        self, x: jax.Array, length: jax.Array, *, kv_only: bool = False, positions: jax.Array | None = None
    ) -> tuple[jax.Array | None, KVCache]:
        """Runs expert 0 over x [b, t, width], of which the first `length` [b] tokens are valid.

        Returns the normalised output and the cache. With `kv_only` the output is None and the last layer
        stops at its keys and values, because the suffix attends to nothing else. `positions` [b, t] are below t; None:
        the tokens stand one after the other.
        """
        config = self.experts[0]
        positions = jnp.arange(x.shape[1])[None] if positions is None else positions
        rope = _rope_angles(positions, x.shape[1], config.head_dim)

        def layer(x: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            weights, last = inputs
            weights = fuse_projections(weights, self.dtype)
            q, k, v, gate = _project(x, weights, config, rope, None)

            def rest(x: jax.Array) -> jax.Array:
                return _mix(x, multi_query_attention(q, k, v, length), weights, config, gate, None)

            return (jax.lax.cond(last, lambda x: x, rest, x) if kv_only else rest(x)), (k, v)

        is_last = jnp.arange(config.depth) == config.depth - 1
        inputs = self._expert_weights(0), is_last
        x, (k, v) = scan_layers(layer, x.astype(self.dtype), inputs, self.remat_policy)
        cache = KVCache(k=k, v=v, length=length)
        return (None if kv_only else rms_norm(x, param_dict(self.final_norm), None)[0]), cache

    def run_suffix(
        self,
        x: jax.Array,
        context: KVCache,
        *,
        condition: jax.Array | None = None,
        layers: list[LayerWeights] | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs expert 1 over n sequences x [b, n, t, width] per batch entry that share a context.

        `condition` [b, n, width] is the condition of adaRMS. `layers` are this expert's weights as `unstack` gives
        them, for callers that run the expert many times. Returns the normalised output, and keys and values
        [depth, b, n, t, head_dim].
        """
        config = self.experts[1]
        steps = jnp.arange(x.shape[2])
        rope = _rope_angles(context.length[:, None] + steps, context.k.shape[2] + len(steps), config.head_dim)
        rope = (rope[0][:, None], rope[1][:, None])

        def layer(x: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            weights, context_k, context_v = inputs
            if layers is None:
                weights = fuse_projections(weights, self.dtype)
            q, k, v, gate = _project(x, weights, config, rope, condition)
            attended = shared_context_attention(q, k, v, (context_k, context_v, context.length))
            return _mix(x, attended, weights, config, gate, condition), (k, v)

        x = x.astype(self.dtype)
        if layers is None:
            stacked = self._expert_weights(1), context.k, context.v
            x, (k, v) = scan_layers(layer, x, stacked, self.remat_policy)
        else:
            keys_and_values = []
            for inputs in zip(layers, context.k, context.v, strict=True):
                x, kv = layer(x, inputs)
                keys_and_values.append(kv)
            k, v = (jnp.stack(side) for side in zip(*keys_and_values, strict=True))
        return rms_norm(x, param_dict(self.final_norm_1), condition)[0], k, v

    def run_causal(
        self,
        x: jax.Array,
        context: KVCache,
        positions: jax.Array,
        *,
        before: tuple[jax.Array, jax.Array, jax.Array] | None = None,
        weights: LayerWeights | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs expert 0 over n sequences x [b, n, t, width] that follow one context, at positions [b, t].

        Each token sees the context, itself and the tokens before it. `before` holds the keys and values
        [depth, b, n, s, head_dim] of earlier tokens and their number, to which one more token (t = 1) is added; without
        it, the t tokens are all. `weights` are those of `compute_weights`, for callers that run the expert many times.
        Returns the normalised output, and keys and values with the new ones among them.
        """
        config = self.experts[0]
        sin, cos = _rope_angles(positions, context.k.shape[2] + _room(x, before), config.head_dim)
        rope = (sin[:, None], cos[:, None])
        if before is None:
            visible = jnp.tril(jnp.ones((x.shape[2], x.shape[2]), jnp.bool_))
        else:
            visible = (jnp.arange(before[0].shape[3]) <= before[2])[None]

        def layer(x: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            weights, context_k, context_v, *earlier = inputs
            weights = fuse_projections(weights, self.dtype)
            q, k, v, gate = _project(x, weights, config, rope, None)
            if before is not None:
                k, v = (
                    jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), before[2], axis=2)
                    for old, new in zip(earlier, (k, v), strict=True)
                )
            attended = shared_context_attention(q, k, v, (context_k, context_v, context.length), visible)
            return _mix(x, attended, weights, config, gate, None), (k, v)

        weights = self._expert_weights(0) if weights is None else weights
        stacked = (weights, context.k, context.v, *(() if before is None else before[:2]))
        x, (k, v) = scan_layers(layer, x.astype(self.dtype), stacked, self.remat_policy)
        return rms_norm(x, param_dict(self.final_norm), None)[0], k, v

    def compute_weights(self, index: int) -> LayerWeights:
        """An expert's weights with its large matrices in the compute dtype: worth it when many steps reuse them."""
        weights = self._expert_weights(index)
        for name in ("q", "kv", "out"):
            weights[name] = weights[name] | {"w": weights[name]["w"].astype(self.dtype)}
        matrices = {name: weights["mlp"][name].astype(self.dtype) for name in ("gating_einsum", "linear")}
        return weights | {"mlp": weights["mlp"] | matrices}

    def unstack(self, index: int) -> list[LayerWeights]:
        """An expert's weights layer by layer, ready to multiply with: worth it when many steps reuse them."""
        stacked = self._expert_weights(index)
        layers = []
        for i in range(self.experts[index].depth):
            weights = fuse_projections(jax.tree.map(lambda w, i=i: w[i], stacked), self.dtype)
            # The compiler would join gate and up itself otherwise, in every step.
            joined = jnp.concatenate([weights.pop("gate"), weights.pop("up")], axis=1)
            layers.append(weights | {"gate_up": joined})
        return layers

    def _expert_weights(self, index: int) -> LayerWeights:
        layers = param_dict(self.layers)
        names = {"q": "q_einsum", "kv": "kv_einsum", "out": "attn_vec_einsum"}
        attention = {short: layers["attn"][expert_name(name, index)] for short, name in names.items()}
        rest = ("mlp", "pre_attention_norm", "pre_ffw_norm")
        return attention | {name: layers[expert_name(name, index)] for name in rest}


def _room(x: jax.Array, before: tuple[jax.Array, jax.Array, jax.Array] | None) -> int:
    """How far behind its context a sequence can reach, and the step that openpi's decoding is ahead."""
    return (x.shape[2] if before is None else before[0].shape[3]) + 1


def fuse_projections(weights: LayerWeights, dtype: jnp.dtype) -> LayerWeights:
    """One layer's weights in the compute dtype as plain matrices, q, k and v side by side in one.

    Adapters and norms stay as they are: adapters give openpi's numbers only as products of their own.
    """
    heads = jnp.concatenate([weights["q"]["w"], weights["kv"]["w"][:, 0]]).astype(dtype)  # [heads + 2, d, h]
    out, mlp = weights["out"]["w"].astype(dtype), weights["mlp"]
    gate, up = mlp["gating_einsum"].astype(dtype)  # [d, m] each; a joined matrix would have its gradient copied
    width = heads.shape[1]
    return weights | {
        "qkv": jnp.moveaxis(heads, 0, 1).reshape(width, -1),
        "attn_vec": out.reshape(-1, width),
        "gate": gate,
        "up": up,
        "down": mlp["linear"].astype(dtype),
    }


def _project(
    x: jax.Array,
    weights: LayerWeights,
    config: GemmaConfig,
    rope: tuple[jax.Array, jax.Array],
    condition: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The first half of a layer on x [..., t, width]: scaled queries [..., t, heads, h], k and v [..., t, h], gate."""
    y, gate = rms_norm(split_by_sample(x), weights["pre_attention_norm"], condition)
    qkv = (y @ weights["qkv"]).reshape(*y.shape[:-1], config.num_heads + 2, config.head_dim)
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    if config.lora:
        letters = "abc"[: y.ndim - 1]
        q = q + lora.einsum_update(f"{letters}d,gdh->{letters}gh", y, weights["q"], config.lora)
        update = lora.einsum_update(f"{letters}d,xydh->x{letters}yh", y, weights["kv"], config.lora)[..., 0, :]
        k, v = k + update[0], v + update[1]
    q = _apply_rope(q, rope) * config.head_dim**-0.5
    return q, _apply_rope(k[..., None, :], rope)[..., 0, :], v, gate


def _mix(
    x: jax.Array,
    attended: jax.Array,
    weights: LayerWeights,
    config: GemmaConfig,
    gate: jax.Array | None,
    condition: jax.Array | None,
) -> jax.Array:
    """The second half of a layer: output projection of attended [..., t, heads, h], then feed-forward."""
    y = attended.reshape(*attended.shape[:-2], -1) @ weights["attn_vec"]
    if config.lora:
        letters = "abc"[: x.ndim - 1]
        y = y + lora.einsum_update(f"{letters}gh,ghd->{letters}d", attended, weights["out"], config.lora)
    x = _gated_residual(x, y, gate)
    y, gate = rms_norm(x, weights["pre_ffw_norm"], condition)
    if "gate_up" in weights:
        opened, up = jnp.split(y @ weights["gate_up"], 2, axis=-1)
    else:
        opened, up = y @ weights["gate"], y @ weights["up"]
    if config.lora:
        opened_update, up_update = lora.gating_update(y, weights["mlp"])
        opened, up = opened + opened_update, up + up_update
    hidden = jax.nn.gelu(opened) * up
    y = hidden @ weights["down"]
    if config.lora:
        y = y + lora.linear_update(hidden, weights["mlp"])
    return split_by_sample(_gated_residual(x, y, gate))


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
    """sin and cos of the rotary angles for positions [b, t] below `length`, float32 [b, t, 1, head_dim / 2].

    They are looked up in a constant table: at positions in the hundreds the last bit of an angle shows, and XLA may
    turn the division into a product with a rounded reciprocal.
    """
    exponent = np.arange(head_dim // 2, dtype=np.float32) * np.float32(2 / head_dim)
    radians = np.arange(length, dtype=np.float32)[:, None] / np.float32(_ROPE_BASE) ** exponent
    table = jnp.asarray(np.stack([np.sin(radians), np.cos(radians)]))
    sin, cos = jnp.take(table, positions, axis=1)[..., None, :]
    return sin, cos


def _apply_rope(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates [..., t, heads, head_dim]; the two halves of the head are the two coordinates."""
    sin, cos = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
