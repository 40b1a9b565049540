import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from acrlpd.monitoring.pytree_checks import (
    check_optimizer_consistency,
    check_pytree_leaf_dtypes,
    compare_pytree_structures,
    diagnose_pytree_structure,
    validate_fsdp_compatibility,
)

TREE = {"kernel": jnp.zeros((3, 4)), "frozen": {"table": jnp.zeros((2,), jnp.bfloat16)}, "count": jnp.asarray(3)}


def test_diagnosis_names_what_is_inside() -> None:
    diagnosis = diagnose_pytree_structure(TREE, "state")
    assert (diagnosis.num_leaves, diagnosis.num_elements, diagnosis.num_bytes) == (3, 15, 48 + 4 + 4)
    assert diagnosis.dtypes == {"int32": 1, "bfloat16": 1, "float32": 1}
    assert diagnosis.largest[0].startswith("['kernel'] float32[3, 4]")
    assert diagnosis.weak_types == ("['count']",)  # made from a Python number
    assert "state: 3 leaves, 15 elements" in str(diagnosis)


def test_diagnosis_finds_what_is_no_array() -> None:
    assert diagnose_pytree_structure({"a": 1.0}).not_arrays == ("['a']: float",)


def test_equal_trees() -> None:
    difference = compare_pytree_structures(TREE, jax.tree.map(lambda x: x + 0, TREE), "saved", "now")
    assert difference
    assert str(difference) == "saved and now have the same structure"


def test_differences_are_named() -> None:
    other = {"kernel": jnp.zeros((3, 5)), "frozen": {}, "new": np.zeros(1)}
    difference = compare_pytree_structures(TREE, other, "saved", "now")
    assert not difference
    assert difference.only_in_first == ("['count']", "['frozen']['table']")
    assert difference.only_in_second == ("['new']",)
    assert difference.changed == ("['kernel']: float32[3, 4] and float32[3, 5]",)
    text = str(difference)
    assert "only in saved" in text
    assert "['kernel']: float32[3, 4] and float32[3, 5]" in text


def test_a_static_difference_is_found() -> None:
    def partial(function: object) -> object:
        return jax.tree_util.Partial(function, jnp.zeros(2))

    assert compare_pytree_structures(partial(jnp.sin), partial(jnp.sin))
    difference = compare_pytree_structures(partial(jnp.sin), partial(jnp.cos))
    assert not difference
    assert "static field differs" in str(difference)


def test_optimizers() -> None:
    adam = functools.partial(optax.adamw, weight_decay=0.1)
    assert check_optimizer_consistency(adam(1e-3), adam(1e-4), TREE)
    difference = check_optimizer_consistency(adam(1e-3), optax.sgd(1e-3), TREE, "adam", "sgd")
    assert not difference
    assert any("mu" in path for path in difference.only_in_first)


def test_wrong_dtypes() -> None:
    assert check_pytree_leaf_dtypes(TREE, jnp.float32) == {"bfloat16": ["['frozen']['table']"]}
    assert check_pytree_leaf_dtypes(TREE) == {"float32": ["['kernel']"]}


def test_fsdp_compatibility() -> None:
    mesh = AbstractMesh((1, 4), ("batch", "fsdp"))
    split, whole, data = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp",), (), (("batch", "fsdp"),)))
    state = {
        "even": jax.ShapeDtypeStruct((8, 2), jnp.float32),
        "odd": jax.ShapeDtypeStruct((7, 2), jnp.float32),
        "large": jax.ShapeDtypeStruct((2**12, 2**12), jnp.float32),
    }
    fine = validate_fsdp_compatibility({"even": state["even"]}, {"even": split}, data, 8)
    assert fine
    assert str(fine) == "the state and the batch can be sharded"
    report = validate_fsdp_compatibility(state, {"even": split, "odd": split, "large": whole}, data, 6)
    assert not report
    assert len(report.problems) == 2
    assert report.problems[0].startswith("['odd'] (7, 2)")
    assert report.problems[1] == "batch_size 6 is no multiple of the 4 devices"
    assert report.warnings == ("['large'] float32[4096, 4096], 64.0 MiB lies whole on every device",)
