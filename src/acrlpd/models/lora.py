"""Weights with optional low-rank adapters, with openpi's names and exactly openpi's mathematics.

Two of its properties look like slips but are what released adapters were trained with: the feed-forward
update is not scaled by alpha / rank, and the attention output projection sums over heads in each factor
separately.
"""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.pi0_config import LoRAConfig

_init_lora = nnx.initializers.normal(stddev=0.01)


class Einsum(nnx.Module):
    """A weight for `einsum`, stacked over layers, with adapters lora_a and lora_b when asked for.

    `shape` ends in (in, out); the adapters replace one of the two by the rank.
    """

    def __init__(
        self,
        depth: int,
        shape: Sequence[int],
        init: nnx.Initializer,
        *,
        lora: LoRAConfig | None,
        rngs: nnx.Rngs,
    ):
        self.w = nnx.Param(init(rngs.params(), (depth, *shape), jnp.float32))
        if lora is not None:
            *lead, fan_in, fan_out = shape
            self.lora_a = nnx.Param(_init_lora(rngs.params(), (depth, *lead, fan_in, lora.rank), jnp.float32))
            self.lora_b = nnx.Param(_init_lora(rngs.params(), (depth, *lead, lora.rank, fan_out), jnp.float32))


class FeedForward(nnx.Module):
    """A gated feed-forward block's weights, stacked over layers."""

    def __init__(self, depth: int, width: int, mlp_dim: int, *, lora: LoRAConfig | None, rngs: nnx.Rngs):
        init = lecun_normal(batch_axes=1)
        self.gating_einsum = nnx.Param(
            lecun_normal(batch_axes=2)(rngs.params(), (depth, 2, width, mlp_dim), jnp.float32)
        )
        self.linear = nnx.Param(init(rngs.params(), (depth, mlp_dim, width), jnp.float32))
        if lora is not None:

            def adapter(*shape: int) -> nnx.Param:
                return nnx.Param(_init_lora(rngs.params(), (depth, *shape), jnp.float32))

            self.gating_einsum_lora_a = adapter(2, width, lora.rank)
            self.gating_einsum_lora_b = adapter(2, lora.rank, mlp_dim)
            self.linear_lora_a = adapter(mlp_dim, lora.rank)
            self.linear_lora_b = adapter(lora.rank, width)


def lecun_normal(*, batch_axes: int, in_axis: int | Sequence[int] = -2) -> nnx.Initializer:
    """lecun_normal whose fan-in ignores the leading `batch_axes` (layers, heads, gate / up)."""
    return nnx.initializers.lecun_normal(in_axis=in_axis, out_axis=-1, batch_axis=tuple(range(batch_axes)))


Weights = dict[str, jax.Array]


def einsum(equation: str, x: jax.Array, weights: Weights, lora: LoRAConfig | None) -> jax.Array:
    """`jnp.einsum(equation, x, w)` in x's dtype plus the scaled low-rank update."""
    y = jnp.einsum(equation, x, weights["w"].astype(x.dtype))
    if lora is None:
        return y
    first, second = _lora_equations(equation)
    update = jnp.einsum(first, x, weights["lora_a"].astype(x.dtype))
    update = jnp.einsum(second, update, weights["lora_b"].astype(x.dtype))
    return y + update * lora.scaling


def feed_forward(x: jax.Array, weights: Weights) -> jax.Array:
    """gelu(x W_gate) * (x W_up) W_down in x's dtype."""
    gate = _adapted_dot(x, weights, "gating_einsum", 0)
    up = _adapted_dot(x, weights, "gating_einsum", 1)
    return _adapted_dot(jax.nn.gelu(gate) * up, weights, "linear", None)


def _adapted_dot(x: jax.Array, weights: Weights, name: str, index: int | None) -> jax.Array:
    def pick(key: str) -> jax.Array:
        w = weights[key]
        return (w if index is None else w[index]).astype(x.dtype)

    y = x @ pick(name)
    if f"{name}_lora_a" in weights:
        y = y + (x @ pick(f"{name}_lora_a")) @ pick(f"{name}_lora_b")
    return y


def _lora_equations(equation: str) -> tuple[str, str]:
    """Splits "x,w->y" into the products with lora_a and lora_b; "r" is the rank."""
    match = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation)
    if match is None or "r" in equation:
        raise ValueError(f"expected an einsum 'x,w->y' without the letter r; found {equation!r}")
    x, w, y = match.groups()
    fan_in, fan_out = w[-2], w[-1]
    a, b = w.replace(fan_out, "r"), w.replace(fan_in, "r")
    inner = y.replace(fan_out, "r")
    return f"{x},{a}->{inner}", f"{inner},{b}->{y}"
