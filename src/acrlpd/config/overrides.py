"""Changes single fields of a config by dotted name. The command line, YAML files and code all come through here.

A section may have a method `implied_changes(given)`: `given` are the fields of the section that are being set, the
result holds fields that change with them. A field that is itself in `given` keeps the value from there.
"""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from acrlpd.choice import Choice, hint, is_family, kind_name
from acrlpd.config.run import TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import (
    TYPE_KEY,
    ConfigError,
    all_fields,
    families,
    field_types,
    flatten,
    from_dict,
    is_section,
    section_class,
    to_dict,
    type_options,
)

# Short names, and the section names of experiment files, for fields that live elsewhere in the tree.
# The longest prefix that matches a whole part of the dotted name wins.
ALIASES = {
    **{field.name: f"training.{field.name}" for field in dataclasses.fields(TrainingConfig)},
    "best_of_n_samples": "acrlpd.num_action_samples",
    "bc_weight": "acrlpd.loss_weights.bc_weight",
    "loss_weights": "acrlpd.loss_weights",
    "pi0_lr": "actor_lr_schedule.peak_lr",
    "critic_lr": "critic_lr_schedule.peak_lr",
    "fsdp_devices": "fsdp.fsdp_devices",
    "checkpoint_dir": "checkpoints.directory",
    "lerobot_repo_id": "data.repo_id",
    "data_dir": "data.data_dir",
    "data.adapt_to_pi": "data.robot.adapt_to_pi",
    "env.replan_steps": "env.execution.steps",
    "training.batch_size": "batch_size",
    "training.best_of_n_samples": "acrlpd.num_action_samples",
    "model.pi0_config": "model",
    "model.pi0_config.diffusion_steps": "acrlpd.sampling_steps",
    "model.diffusion_steps": "acrlpd.sampling_steps",
    "optimization.pi0_lr_schedule": "actor_lr_schedule",
    "optimization.critic_lr_schedule": "critic_lr_schedule",
    "optimization.temperature_lr_schedule": "temperature_lr_schedule",
    "optimization.pi0_optimizer": "actor_optimizer",
    "optimization.critic_optimizer": "critic_optimizer",
    "optimization.temperature_optimizer": "temperature_optimizer",
    "optimization.gradient_accumulation_steps": "training.gradient_accumulation_steps",
}


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A value for one field. `where` says in error messages where the value was written."""

    key: str
    value: Any
    where: str = ""

    @property
    def path(self) -> str:
        """The full dotted name of the field, or of the section whose class is chosen."""
        path = resolve_alias(self.key)
        section = path.removesuffix(f".{TYPE_KEY}")
        return section if section in families() else path

    def error(self, message: str) -> str:
        return f"{self.where}: {message}" if self.where else message


def apply_config_overrides(
    config: RLTrainConfig, overrides: Mapping[str, Any] | None = None, **fields: Any
) -> RLTrainConfig:
    """A copy of `config` with fields set by dotted (or short) name, for example {"critic.num_critics": 4}.

    Values may be nested mappings. All mistakes are reported in one `ConfigError`.
    """
    flat = flatten({**(overrides or {}), **fields})
    return assign(config, [Assignment(key, value) for key, value in flat])


def assign(config: RLTrainConfig, assignments: Iterable[Assignment]) -> RLTrainConfig:
    """Applies the assignments: first those that choose a class, because the class decides which fields exist."""
    assignments = list(assignments)
    choices = [assignment for assignment in assignments if assignment.path in families()]
    values = [assignment for assignment in assignments if assignment.path not in families()]
    data = to_dict(config)
    problems = _set_all(data, choices)
    given = {assignment.path: assignment.value for assignment in values}
    implied = [Assignment(*change) for change in _implied_changes(from_dict(RLTrainConfig, data), given)]
    problems += _set_all(data, [*implied, *values])
    if problems:
        raise ConfigError("\n".join(problems))
    return from_dict(RLTrainConfig, data)


def resolve_alias(key: str) -> str:
    """The field's full dotted name."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        target = ALIASES.get(".".join(parts[:length]))
        if target is not None:
            return ".".join([target, *parts[length:]])
    return key


def _implied_changes(section: Any, given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every field that changes because of `given`."""
    cls: type = type(section)
    for name, annotation in field_types(cls).items():
        inner = {key.removeprefix(f"{name}."): given[key] for key in given if key.startswith(f"{name}.")}
        if inner and is_section(annotation):
            yield from _implied_changes(getattr(section, name), inner, f"{prefix}{name}.")
    if hasattr(section, "implied_changes"):
        yield from ((f"{prefix}{key}", value) for key, value in section.implied_changes(given).items())


def _set_all(data: dict[str, Any], assignments: Iterable[Assignment]) -> list[str]:
    """Writes the valid values into `data`; returns an error message for each of the others."""
    problems: list[str] = []
    for assignment in assignments:
        try:
            _set(data, assignment)
        except ConfigError as error:
            problems.append(assignment.error(str(error)))
    return problems


def _set(data: dict[str, Any], assignment: Assignment) -> None:
    """Walks schema and data together down to the leaf, and writes the checked value there."""
    cls: type = RLTrainConfig
    parts = assignment.path.split(".")
    for depth, part in enumerate(parts):
        known = field_types(cls)
        if part not in known:
            raise ConfigError(_unknown(assignment.key, parts, depth, cls))
        annotation, is_last, path = known[part], depth == len(parts) - 1, ".".join(parts[: depth + 1])
        if not is_section(annotation):
            if not is_last:
                raise ConfigError(f"{path} is a plain value and has no fields")
            data[part] = check_value(assignment.key, annotation, assignment.value)
        elif is_last and is_family(annotation):
            data[part] = _choose(data[part], annotation, assignment)
        elif is_last:
            names = ", ".join(field_types(annotation))
            raise ConfigError(f"{assignment.key} is a section; set its fields ({names})")
        else:
            data = data[part]
            cls = section_class(annotation, data, path)


def _choose(data: dict[str, Any], family: type[Choice], assignment: Assignment) -> dict[str, Any]:
    """The section of the class that was named, with the defaults of that class; the same class keeps its values."""
    if not isinstance(assignment.value, str):
        raise ConfigError(f"{assignment.key} must be the name of a kind; found {assignment.value!r}")
    chosen = section_class(family, {TYPE_KEY: assignment.value}, assignment.key)
    name = kind_name(chosen)
    return data if data[TYPE_KEY] == name else {TYPE_KEY: name} | to_dict(chosen())


def _unknown(written: str, parts: list[str], depth: int, section: type) -> str:
    """Names the nearest valid key: in the same section, or of the same name elsewhere; else the keys of the section.

    A section that can be one of several classes has only the keys of the class that it is.
    """
    names = [name for name, annotation in all_fields().items() if not is_section(annotation)]
    where, leaf, beside = ".".join(parts[:depth]), parts[-1], field_types(section)
    close = difflib.get_close_matches(parts[depth], beside, n=1, cutoff=0.7)
    guesses = [".".join([*parts[:depth], part, *parts[depth + 1 :]]) for part in close]
    guesses = [guess for guess in guesses if guess in names]
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    if not any(name.startswith(f"{where}.") for name in elsewhere):
        guesses += elsewhere
    if not guesses and not depth:
        leaves = {name.rpartition(".")[2]: name for name in reversed(names)} | {alias: alias for alias in ALIASES}
        guesses = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    if guesses:
        tail = f"did you mean {guesses[0]!r}?"
    elif depth:
        tail = f"{where} ({section.__name__}) has {', '.join(beside) or 'no keys'}"
    else:
        tail = "`acrlpd configs show NAME` lists all keys"
    return f"unknown key {written!r}; {tail}"


def check_value(key: str, annotation: Any, value: Any) -> Any:
    """The value as the field wants it (an integer becomes a float, a list stays a list), or ConfigError."""
    options = type_options(annotation)
    for option in options:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return _convert(option, value)
    expected = " or ".join(_describe(option) for option in options)
    choices = [c for o in options if typing.get_origin(o) is typing.Literal for c in typing.get_args(o)]
    raise ConfigError(f"{key} must be {expected}; found {value!r}{hint(str(value), choices)}")


def _convert(option: Any, value: Any) -> Any:
    """The value as a field of this one type holds it; an exception if it does not fit."""
    origin, args = typing.get_origin(option), typing.get_args(option)
    if origin is tuple and isinstance(value, list | tuple):
        element_types = args[:1] * len(value) if args[-1] is Ellipsis else args
        return [_convert(t, v) for t, v in zip(element_types, value, strict=True)]
    if origin is typing.Literal and value in args:
        return value
    is_number = not isinstance(value, bool)  # although Python counts True among the integers
    if option is float and isinstance(value, int | float) and is_number and math.isfinite(value):
        return float(value)
    if option in (int, bool, str, types.NoneType) and isinstance(value, option) and (option is not int or is_number):
        return value
    raise TypeError(f"{value!r} is not {_describe(option)}")


def _describe(option: Any) -> str:
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option)))
    if origin is tuple:
        element, *others = typing.get_args(option)
        return f"a list of {'' if Ellipsis in others else f'{1 + len(others)} '}{element.__name__}"
    names = {types.NoneType: "null", int: "an integer", float: "a finite number", bool: "true or false"}
    return names.get(option, "a string")
