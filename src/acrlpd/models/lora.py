"""Weights with optional low-rank adapters, with openpi's names and exactly openpi's mathematics.

Released adapters were trained with two properties that look like mistakes: the feed-forward update is not
scaled by alpha / rank, and the attention output projection sums over heads in each factor separately.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.paligemma_sizes import LoRAConfig

_init_lora = nnx.initializers.normal(stddev=0.01)


class Einsum(nnx.Module):
    """A weight for `einsum`, stacked over layers, with adapters lora_a and lora_b if `lora` is given.

    `shape` ends in (in, out); the adapters replace one of the two by the rank.
    """

    def __init__(
        self, depth: int, shape: Sequence[int], init: nnx.Initializer, *, lora: LoRAConfig | None, rngs: nnx.Rngs
    ):
        self.w = nnx.Param(init(rngs.params(), (depth, *shape), jnp.float32))
        if lora is not None:
            *lead, fan_in, fan_out = shape
            self.lora_a = nnx.Param(_init_lora(rngs.params(), (depth, *lead, fan_in, lora.rank), jnp.float32))
            self.lora_b = nnx.Param(_init_lora(rngs.params(), (depth, *lead, lora.rank, fan_out), jnp.float32))


class FeedForward(nnx.Module):
    """A gated feed-forward block's weights, stacked over layers."""

    def __init__(self, depth: int, width: int, mlp_dim: int, *, lora: LoRAConfig | None, rngs: nnx.Rngs):
        def param(init: nnx.Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (depth, *shape), jnp.float32))

        self.gating_einsum = param(lecun_normal(batch_axes=2), 2, width, mlp_dim)
        self.linear = param(lecun_normal(batch_axes=1), mlp_dim, width)
        if lora is not None:
            self.gating_einsum_lora_a = param(_init_lora, 2, width, lora.rank)
            self.gating_einsum_lora_b = param(_init_lora, 2, lora.rank, mlp_dim)
            self.linear_lora_a = param(_init_lora, mlp_dim, lora.rank)
            self.linear_lora_b = param(_init_lora, lora.rank, width)


def lecun_normal(*, batch_axes: int, in_axis: int | Sequence[int] = -2) -> nnx.Initializer:
    """lecun_normal whose fan-in ignores the leading `batch_axes` (layers, heads, gate / up)."""
    return nnx.initializers.lecun_normal(in_axis=in_axis, out_axis=-1, batch_axis=tuple(range(batch_axes)))


Weights = dict[str, jax.Array]


def einsum_update(equation: str, x: jax.Array, adapters: Weights, lora: LoRAConfig) -> jax.Array:
    """What the adapters of an `Einsum` add to `jnp.einsum(equation, x, w)`, in x's dtype.

    The equation "x,w->y" becomes two products, with lora_a and with lora_b. The letter "r" is the rank.
    """
    inputs, w, outputs = re.split(",|->", equation)
    fan_in, fan_out = w[-2], w[-1]
    inner = outputs.replace(fan_out, "r")
    update = jnp.einsum(f"{inputs},{w.replace(fan_out, 'r')}->{inner}", x, adapters["lora_a"].astype(x.dtype))
    second = f"{inner},{w.replace(fan_in, 'r')}->{outputs}"
    return jnp.einsum(second, update, adapters["lora_b"].astype(x.dtype)) * lora.scaling


def gating_update(x: jax.Array, adapters: Weights) -> tuple[jax.Array, jax.Array]:
    """What the adapters add to the gate and to the up projection of a `FeedForward`."""
    a, b = (adapters[f"gating_einsum_lora_{side}"].astype(x.dtype) for side in "ab")
    return (x @ a[0]) @ b[0], (x @ a[1]) @ b[1]


def linear_update(x: jax.Array, adapters: Weights) -> jax.Array:
    """What the adapters add to the down projection of a `FeedForward`."""
    return (x @ adapters["linear_lora_a"].astype(x.dtype)) @ adapters["linear_lora_b"].astype(x.dtype)


def has_adapters(params: nnx.State) -> bool:
    return any("lora" in str(path[-1]) for path, _ in nnx.to_flat_state(params))


def merge_adapters(params: nnx.State, experts: Sequence[LoRAConfig | None]) -> nnx.State:
    """Parameters of the model without adapters: each adapter is added to its weight, which becomes float32.

    `experts` are the adapters' settings, expert by expert.
    """
    flat = {tuple(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    merged: list[tuple[tuple[str, ...], Any]] = []
    for path, leaf in flat.items():
        *parents, name = path
        if "lora" in name:
            continue
        prefix = "lora" if name == "w" else f"{name}_lora"  # the only weight of an `Einsum` is "w"
        a, b = (flat.get((*parents, f"{prefix}_{side}")) for side in "ab")
        if a is not None and b is not None:
            weight, a, b = (x.get_value().astype(jnp.float32) for x in (leaf, a, b))
            lora = experts[1 if parents[-1].endswith("_1") else 0]
            assert lora is not None
            if parents[-1].startswith("attn_vec_einsum"):  # [layers, heads, in, rank] and [layers, heads, rank, out]
                b = jnp.sum(b, axis=1, keepdims=True)
            update = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            leaf = leaf.replace(weight + (update * lora.scaling if name == "w" else update))
        merged.append((path, leaf))
    return nnx.from_flat_state(merged)
