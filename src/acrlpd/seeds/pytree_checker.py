"""The seeds' checks of trees of arrays."""

import collections
import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, Sharding

from acrlpd.agents.optimizers.base import Optimizer
from acrlpd.seeds.fsdp import validate_fsdp_sharding
from acrlpd.units import format_bytes

logger = logging.getLogger(__name__)


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def diagnose_pytree_structure(pytree: Any, name: str = "pytree") -> dict[str, Any]:
    """How many arrays a tree has, how large they are, and of which dtypes."""
    leaves = _leaves(pytree)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    dtypes = collections.Counter(str(leaf.dtype) for leaf in leaves.values())
    found = {"name": name, "num_leaves": len(leaves), "num_bytes": total, "dtypes": dict(dtypes)}
    logger.info("%s: %d arrays, %s, %s", name, len(leaves), format_bytes(total), dict(dtypes))
    return found


def check_pytree_leaf_dtypes(pytree: Any, expected_dtype: Any = jnp.bfloat16) -> dict[str, list[str]]:
    """The names of the arrays that have another dtype, by dtype."""
    others: dict[str, list[str]] = collections.defaultdict(list)
    for name, leaf in _leaves(pytree).items():
        if leaf.dtype != jnp.dtype(expected_dtype):
            others[str(leaf.dtype)].append(name)
    return dict(others)


def compare_pytree_structures(tree1: Any, tree2: Any, name1: str = "tree1", name2: str = "tree2") -> dict[str, Any]:
    """Which arrays only one of two trees has, and which differ in shape or dtype."""
    first, second = _leaves(tree1), _leaves(tree2)
    described = {
        name: (f"{first[name].dtype}{first[name].shape}", f"{second[name].dtype}{second[name].shape}")
        for name in first
        if name in second
    }
    return {
        "same_structure": bool(jax.tree.structure(tree1) == jax.tree.structure(tree2)),  # type: ignore[operator]
        f"only_in_{name1}": [name for name in first if name not in second],
        f"only_in_{name2}": [name for name in second if name not in first],
        "different": {name: both for name, both in described.items() if both[0] != both[1]},
    }


def check_optimizer_consistency(
    opt1: Optimizer | optax.GradientTransformation,
    opt2: Optimizer | optax.GradientTransformation,
    name1: str = "opt1",
    name2: str = "opt2",
) -> bool:
    """Whether two optimizers are the very same functions, so that states with either share one compiled step.

    `create_optimizer` remembers what it has made, so optimizers of equal configs are consistent.
    """
    are_same = opt1 == opt2
    if not are_same:
        logger.warning("%s and %s are made of other functions: a step is compiled for each of them", name1, name2)
    return are_same


def validate_fsdp_compatibility(train_state: Any, mesh: Mesh, data_sharding: Sharding) -> bool:
    """Whether the state lies where FSDP puts it, and batches are split over the devices of the same mesh."""
    report = validate_fsdp_sharding(train_state, mesh)
    if not report:
        logger.warning("%s", report)
    return bool(report) and data_sharding.device_set == set(mesh.devices.flat)
