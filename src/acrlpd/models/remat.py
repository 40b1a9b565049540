"""What the backward pass of a layer keeps and what it computes again."""

from collections.abc import Callable
from typing import Any

import jax

from acrlpd.models.families.pi0 import RematPolicy


def rematerialise(layer: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """Wraps the body of a scan over layers; `prevent_cse` is not needed inside a scan."""
    if policy == "none":
        return layer
    saveable = {"full": jax.checkpoint_policies.nothing_saveable, "dots": _products_saveable}[policy]
    return jax.checkpoint(layer, policy=saveable, prevent_cse=False)


def _products_saveable(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keeps products with weights, and what a fused attention kernel returns: both cost more than they weigh."""
    if "dot_product_attention" in primitive.name:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
