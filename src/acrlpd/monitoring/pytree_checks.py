"""Looking at pytrees: what is in them, whether two agree, whether they can be sharded.

Most puzzling errors of a compiled train step (a second compile, a mismatch deep inside a tree) come from
two trees that differ in one leaf or in a static field. These functions name the difference.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class PytreeDiagnosis:
    """What a tree holds."""

    name: str
    num_leaves: int
    num_elements: int
    num_bytes: int
    dtypes: dict[str, int]  # dtype -> leaves
    largest: tuple[str, ...]
    weak_types: tuple[str, ...]  # a Python number became an array: the next step may compile again
    not_arrays: tuple[str, ...]

    def __str__(self) -> str:
        dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in self.dtypes.items())
        lines = [
            f"{self.name}: {self.num_leaves} leaves, {self.num_elements:,} elements, "
            f"{self.num_bytes / 2**20:.1f} MiB ({dtypes})"
        ]
        lines += _section("largest", self.largest)
        lines += _section("weakly typed", self.weak_types)
        lines += _section("not arrays", self.not_arrays)
        return "\n".join(lines)


def diagnose_pytree_structure(pytree: Any, name: str = "pytree") -> PytreeDiagnosis:
    """Sizes and dtypes of the leaves, and what does not belong into a train state."""
    leaves = _leaves(pytree)
    arrays = {path: x for path, x in leaves.items() if hasattr(x, "shape") and hasattr(x, "dtype")}
    by_size = sorted(arrays, key=lambda path: -_bytes(arrays[path]))
    return PytreeDiagnosis(
        name=name,
        num_leaves=len(leaves),
        num_elements=sum(math.prod(x.shape) for x in arrays.values()),
        num_bytes=sum(map(_bytes, arrays.values())),
        dtypes=dict(collections.Counter(str(x.dtype) for x in arrays.values()).most_common()),
        largest=tuple(_describe(path, arrays[path]) for path in by_size[:3]),
        weak_types=tuple(path for path, x in arrays.items() if getattr(x, "weak_type", False)),
        not_arrays=tuple(f"{path}: {type(x).__name__}" for path, x in leaves.items() if path not in arrays),
    )


@dataclasses.dataclass(frozen=True)
class PytreeDifference:
    """How two trees differ; true when they do not."""

    names: tuple[str, str]
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    changed: tuple[str, ...]  # other shape or dtype
    static: bool  # same leaves, but something that is not an array differs (a function, a config)

    def __bool__(self) -> bool:
        return not (self.only_in_first or self.only_in_second or self.changed or self.static)

    def __str__(self) -> str:
        first, second = self.names
        if self:
            return f"{first} and {second} have the same structure"
        lines = [f"{first} and {second} differ"]
        lines += _section(f"only in {first}", self.only_in_first)
        lines += _section(f"only in {second}", self.only_in_second)
        lines += _section("other shape or dtype", self.changed)
        if self.static:
            lines.append("  the leaves agree, but a static field differs, for example an optimizer made twice")
        return "\n".join(lines)


def compare_pytree_structures(tree1: Any, tree2: Any, name1: str = "tree1", name2: str = "tree2") -> PytreeDifference:
    """Leaves by name, shape and dtype, and then the static rest."""
    first, second = _leaves(tree1), _leaves(tree2)
    changed = [
        f"{path}: {_kind(first[path])} and {_kind(second[path])}"
        for path in first
        if path in second and _kind(first[path]) != _kind(second[path])
    ]
    same_leaves = first.keys() == second.keys()
    return PytreeDifference(
        names=(name1, name2),
        only_in_first=tuple(path for path in first if path not in second),
        only_in_second=tuple(path for path in second if path not in first),
        changed=tuple(changed),
        static=same_leaves and _structure(tree1) != _structure(tree2),
    )


def check_optimizer_consistency(
    opt1: optax.GradientTransformation,
    opt2: optax.GradientTransformation,
    params: Any,
    name1: str = "opt1",
    name2: str = "opt2",
) -> PytreeDifference:
    """Whether two optimizers keep the same state for `params`; nothing is allocated."""
    return compare_pytree_structures(jax.eval_shape(opt1.init, params), jax.eval_shape(opt2.init, params), name1, name2)


def check_pytree_leaf_dtypes(pytree: Any, expected_dtype: Any = jnp.bfloat16) -> dict[str, list[str]]:
    """dtype -> names of the floating-point leaves that have it instead of the expected one."""
    expected, wrong = jnp.dtype(expected_dtype), collections.defaultdict(list)
    for path, leaf in _leaves(pytree).items():
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype != expected:
            wrong[str(dtype)].append(path)
    return dict(wrong)


@dataclasses.dataclass(frozen=True)
class FSDPCompatibility:
    """What speaks against a placement; true when nothing makes it impossible."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.problems and not self.warnings:
            return "the state and the batch can be sharded"
        return "\n".join([*_section("problems", self.problems), *_section("warnings", self.warnings)])


def validate_fsdp_compatibility(
    train_state: Any, shardings: Any, data_sharding: jax.sharding.NamedSharding, batch_size: int
) -> FSDPCompatibility:
    """Whether the arrays of a state and a batch can lie as `shardings` and `data_sharding` say.

    Warns of large arrays that every device holds whole.
    """
    problems, warnings = [], []
    places = _leaves(shardings)
    for path, array in _leaves(train_state).items():
        place = places.get(path)
        if place is None:
            problems.append(f"{path}: no sharding is given")
            continue
        try:
            shard = place.shard_shape(array.shape)
        except ValueError as error:
            problems.append(f"{path} {tuple(array.shape)}: {error}")
            continue
        if shard == array.shape and _bytes(array) >= 2**26 and place.num_devices > 1:
            warnings.append(f"{_describe(path, array)} lies whole on every device")
    if batch_size % data_sharding.num_devices:
        problems.append(f"batch_size {batch_size} is no multiple of the {data_sharding.num_devices} devices")
    return FSDPCompatibility(tuple(problems), tuple(warnings))


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _kind(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


def _describe(path: str, array: Any) -> str:
    return f"{path} {_kind(array)}, {_bytes(array) / 2**20:.1f} MiB"


def _section(title: str, entries: Iterable[str]) -> list[str]:
    entries = list(entries)
    if not entries:
        return []
    more = [f"    ... and {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    return [f"  {title}:", *(f"    {entry}" for entry in entries[:_SHOWN]), *more]
