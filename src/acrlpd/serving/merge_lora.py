"""Adapters added into the weights they adapt, so that the policy needs no LoRA variant any more.

Follows the adapters' exact mathematics (see `acrlpd.models.lora`): feed-forward updates are not scaled, and
the attention output projection sums the heads of its second factor.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.families.pi0 import LoRAConfig, Pi0Config

Path = tuple[str, ...]


def merged_config(config: Pi0Config) -> Pi0Config:
    """The same network without adapters."""
    return dataclasses.replace(
        config,
        paligemma_variant=config.paligemma_variant.removesuffix("_lora"),
        action_expert_variant=config.action_expert_variant.removesuffix("_lora"),
    )


def merge_lora(params: nnx.State, config: Pi0Config) -> nnx.State:
    """The parameters of `merged_config(config)`; what an adapter changed is float32."""
    if config == merged_config(config):
        raise ValueError("there are no adapters to merge: neither expert of this model is a LoRA variant")
    flat = nnx.to_flat_state(params)
    arrays = {tuple(map(str, path)): leaf.get_value() for path, leaf in flat}
    merged = []
    for path, leaf in flat:
        name = tuple(map(str, path))
        if "lora" in name[-1]:
            continue
        update = _update(name, arrays, config)
        merged.append((path, leaf if update is None else leaf.replace(arrays[name].astype(jnp.float32) + update)))
    return nnx.from_flat_state(merged)


def _update(path: Path, arrays: Mapping[Path, jax.Array], config: Pi0Config) -> jax.Array | None:
    """What the adapters of one weight add to it."""
    *parents, name = path
    prefix = "lora" if name == "w" else f"{name}_lora"  # an einsum's only weight is "w"
    a, b = (arrays.get((*parents, f"{prefix}_{side}")) for side in "ab")
    if a is None or b is None:
        return None
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if name != "w":
        return _product(a, b)
    module = parents[-1]
    if module.startswith("attn_vec_einsum"):  # [layers, heads, in, rank] and [layers, heads, rank, out]
        b = jnp.sum(b, axis=1, keepdims=True)
    return _product(a, b) * _lora(module, config).scaling


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _lora(module: str, config: Pi0Config) -> LoRAConfig:
    """Modules of the action expert carry the suffix _1."""
    expert = config.action_expert if module.endswith("_1") else config.paligemma
    assert expert.lora is not None
    return expert.lora
