"""Config trees as plain data: to nested dicts and back, flat dotted names, differences, and a stable hash."""

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from acrlpd.choice import Choice, find_kind, is_family, kind_name, kind_names
from acrlpd.config.train_config import RLTrainConfig

# Names the member of a family that a section holds, for example `model: {type: pi0, ...}`.
TYPE_KEY = "type"

# These sections say where results go and what is shown. They do not change what a run computes.
NOT_HASHED = ("exp_name", "checkpoints", "logging")


class ConfigError(ValueError):
    """A config that cannot exist. The message names the key, what was expected and what was found."""


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved type, in order of declaration."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def is_section(annotation: Any) -> bool:
    """Whether a field of this type has fields of its own."""
    return is_family(annotation) or (isinstance(annotation, type) and dataclasses.is_dataclass(annotation))


@functools.cache
def all_fields() -> dict[str, Any]:
    """Dotted name -> type of every field and section, over all of the project's own classes that a section may hold."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, annotation in field_types(cls).items():
            yield f"{prefix}{name}", annotation
            if is_family(annotation):
                yield f"{prefix}{name}.{TYPE_KEY}", str
                for kind in kind_names(annotation):
                    yield from walk(find_kind(annotation, kind), f"{prefix}{name}.")
            elif is_section(annotation):
                yield from walk(annotation, f"{prefix}{name}.")

    return dict(walk(RLTrainConfig, ""))


@functools.cache
def families() -> dict[str, type[Choice]]:
    """The sections that are one of several classes, by dotted name."""
    return {name: annotation for name, annotation in all_fields().items() if is_family(annotation)}


def type_options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested dicts of plain values; lists instead of tuples."""
    cls: type = type(config)
    result: dict[str, Any] = {}
    for name, annotation in field_types(cls).items():
        value = getattr(config, name)
        if is_section(annotation):
            kind = {TYPE_KEY: kind_name(value)} if is_family(annotation) else {}
            result[name] = kind | to_dict(value)
        else:
            result[name] = list(value) if isinstance(value, tuple) else value
    return result


def from_dict(cls: type, data: dict[str, Any], path: str = "") -> Any:
    """The inverse of `to_dict` for data whose values were checked.

    A field that the data does not have gets its default.
    """
    kwargs: dict[str, Any] = {}
    for name, annotation in field_types(cls).items():
        if name not in data:
            continue
        value = data[name]
        if is_section(annotation):
            kwargs[name] = from_dict(section_class(annotation, value, f"{path}{name}"), value, f"{path}{name}.")
        else:
            kwargs[name] = tuple(value) if isinstance(value, list) else value
    try:
        return cls(**kwargs)
    except ValueError as error:
        raise ConfigError(f"{path.rstrip('.') or cls.__name__}: {error}") from error


def section_class(annotation: Any, data: dict[str, Any], key: str) -> type:
    """The class of a section whose content is `data`."""
    if not is_family(annotation):
        return annotation
    try:
        return find_kind(annotation, data[TYPE_KEY])
    except ValueError as error:
        raise ConfigError(f"{key} {error}") from error


def flatten(data: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Dotted name and value of every leaf of nested dicts."""
    return flatten_dict(data, sep=".").items()


def diff_configs(old: RLTrainConfig, new: RLTrainConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) for every leaf that differs; None where a config does not have the field."""
    left, right = dict(flatten(to_dict(old))), dict(flatten(to_dict(new)))
    names = [*left, *(name for name in right if name not in left)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """What `diff_configs` has found, with a line for each field."""
    return "\n".join(f"  {name}: {old!r} -> {new!r}" for name, (old, new) in changes.items())


def config_hash(config: RLTrainConfig) -> str:
    """16 hex digits that depend on every field that changes what a run computes, and on no other field."""
    data = {name: value for name, value in to_dict(config).items() if name not in NOT_HASHED}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
