"""Changing single fields of a config by dotted name: one path for the command line, YAML and code."""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from acrlpd.choice import Choice, find_kind, hint, is_family, kind_name, kind_names
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import (
    TYPE_KEY,
    ConfigError,
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
    "offline_steps": "training.offline_steps",
    "online_steps": "training.online_steps",
    "eval_frequency": "training.eval_frequency",
    "log_frequency": "training.log_frequency",
    "save_frequency": "training.save_frequency",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "early_stopping_patience": "training.early_stopping_patience",
    "best_of_n_samples": "acrlpd.num_action_samples",
    "bc_weight": "acrlpd.loss_weights.bc_weight",
    "loss_weights": "acrlpd.loss_weights",
    "acrlpd.actor_loss": "improvement",
    "acrlpd.awr_weight_clip": "improvement.weight_clip",
    "pi0_lr": "actor_lr_schedule.peak_lr",
    "critic_lr": "critic_lr_schedule.peak_lr",
    "fsdp_devices": "fsdp.fsdp_devices",
    "checkpoint_dir": "checkpoints.directory",
    "lerobot_repo_id": "data.repo_id",
    "data_dir": "data.data_dir",
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
    """One field to set, and where that was written, for error messages."""

    key: str
    value: Any
    where: str = ""

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
    """Applies assignments in order; the choice of a class comes first, because the class decides which fields exist."""
    ordered = sorted(assignments, key=lambda a: resolve_alias(a.key).removesuffix(f".{TYPE_KEY}") not in families())
    data = to_dict(config)
    problems: list[str] = []
    for assignment in ordered:
        try:
            _set(data, resolve_alias(assignment.key), assignment)
        except ConfigError as error:
            problems.append(assignment.error(str(error)))
    if problems:
        raise ConfigError("\n".join(problems))
    keys = {resolve_alias(a.key) for a in ordered}
    _refresh_model_defaults(config, data, keys)
    _drop_other_dataset(data["data"], keys)
    return from_dict(RLTrainConfig, data)


def resolve_alias(key: str) -> str:
    """The field's full dotted name."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        target = ALIASES.get(".".join(parts[:length]))
        if target is not None:
            return ".".join([target, *parts[length:]])
    return key


def _set(data: dict[str, Any], path: str, assignment: Assignment) -> None:
    """Walks schema and data together down to the leaf, and writes the checked value there."""
    cls: type = RLTrainConfig
    parts = path.split(".")
    for depth, part in enumerate(parts):
        known = field_types(cls)
        if part not in known:
            raise ConfigError(_unknown(assignment.key, parts, depth, cls))
        annotation, rest = known[part], parts[depth + 1 :]
        if not is_section(annotation):
            if rest:
                raise ConfigError(f"{'.'.join(parts[: depth + 1])} is a plain value and has no fields")
            data[part] = check_value(assignment.key, annotation, assignment.value)
            return
        if is_family(annotation) and rest in ([], [TYPE_KEY]):
            data[part] = _choose(data[part], annotation, assignment)
            return
        if not rest:
            names = ", ".join(field_types(annotation))
            raise ConfigError(f"{assignment.key} is a section; set its fields ({names})")
        data = data[part]
        cls = section_class(annotation, data, ".".join(parts[: depth + 1]))


def _choose(data: dict[str, Any], family: type, assignment: Assignment) -> dict[str, Any]:
    """The section of the class that was named, with the defaults of that class; the same class keeps its values."""
    if not isinstance(assignment.value, str):
        raise ConfigError(f"{assignment.key} is named by text; found {assignment.value!r}")
    try:
        chosen = find_kind(family, assignment.value)
    except ValueError as error:
        raise ConfigError(f"{assignment.key} {error}") from error
    name = kind_name(chosen)
    return data if data[TYPE_KEY] == name else {TYPE_KEY: name} | to_dict(chosen())


def _refresh_model_defaults(config: RLTrainConfig, data: dict[str, Any], keys: set[str]) -> None:
    """Token length and state input follow `pi05` unless they were set by hand."""
    model = data["model"]
    if "model.pi05" not in keys or model["pi05"] == getattr(config.model, "pi05", None):
        return
    for name in ("max_token_len", "discrete_state_input"):
        if f"model.{name}" not in keys:
            model[name] = None


def _drop_other_dataset(data: dict[str, Any], keys: set[str]) -> None:
    """Whoever names a repo_id wants that dataset, not the directory (or the demonstrations for it) of the preset."""
    if "data.repo_id" not in keys or data["repo_id"] is None or "data.data_dir" in keys:
        return
    data["data_dir"] = None
    if "data.demonstrations.num_episodes" not in keys:
        data["demonstrations"]["num_episodes"] = 0


@functools.cache
def field_names() -> tuple[str, ...]:
    """Dotted names of all leaves, over all of the project's own classes that a field may hold."""

    def walk(cls: type, prefix: str) -> Iterable[str]:
        for name, annotation in field_types(cls).items():
            if not is_section(annotation):
                yield f"{prefix}{name}"
            elif is_family(annotation):
                yield f"{prefix}{name}.{TYPE_KEY}"
                for kind in kind_names(annotation):
                    yield from walk(find_kind(annotation, kind), f"{prefix}{name}.")
            else:
                yield from walk(annotation, f"{prefix}{name}.")

    return tuple(dict.fromkeys(walk(RLTrainConfig, "")))


@functools.cache
def families() -> dict[str, type[Choice]]:
    """Sections that hold one of several classes, by dotted name."""

    def walk(cls: type, prefix: str) -> Iterable[tuple[str, type[Choice]]]:
        for name, annotation in field_types(cls).items():
            if is_family(annotation):
                yield f"{prefix}{name}", annotation
            elif is_section(annotation):
                yield from walk(annotation, f"{prefix}{name}.")

    return dict(walk(RLTrainConfig, ""))


def _unknown(written: str, parts: list[str], depth: int, section: type) -> str:
    """Names the nearest valid key: beside the unknown part, or of that name or similar anywhere; else those beside it.

    A section that can be one of several classes has only the keys of the one that it is.
    """
    names, leaf, beside = field_names(), parts[-1], field_types(section)
    close = difflib.get_close_matches(parts[depth], beside, n=1, cutoff=0.7)
    guesses = [".".join([*parts[:depth], part, *parts[depth + 1 :]]) for part in close]
    guesses = [guess for guess in guesses if guess in names]
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    where = ".".join(parts[:depth])
    if not any(name.startswith(f"{where}.") for name in elsewhere):
        guesses += elsewhere
    if not guesses and not depth:
        leaves = {name.rpartition(".")[2]: name for name in reversed(names)} | {alias: alias for alias in ALIASES}
        guesses = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    if guesses:
        tail = f"did you mean {guesses[0]!r}?"
    elif depth:
        tail = f"{where} ({section.__name__}) has {', '.join(beside)}"
    else:
        tail = "`acrlpd configs show NAME` lists all keys"
    return f"unknown key {written!r}; {tail}"


def check_value(key: str, annotation: Any, value: Any) -> Any:
    """The value as the field wants it (an integer becomes a float, a list stays a list), or ConfigError."""
    options = type_options(annotation)
    for option in options:
        accepted, result = _accept(option, value)
        if accepted:
            return result
    expected = " or ".join(_describe(option) for option in options)
    message = f"{key} must be {expected}; found {value!r}"
    choices = [c for o in options if typing.get_origin(o) is typing.Literal for c in typing.get_args(o)]
    raise ConfigError(message + (hint(value, choices) if isinstance(value, str) else ""))


def _accept(option: Any, value: Any) -> tuple[bool, Any]:
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return value in typing.get_args(option), value
    if origin is tuple:
        return _accept_tuple(typing.get_args(option), value)
    if option is types.NoneType:
        return value is None, None
    if option is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return good, float(value) if good else value
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, option), value


def _accept_tuple(element_types: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, value
    if element_types[-1] is Ellipsis:
        element_types = (element_types[0],) * len(value)
    if len(value) != len(element_types):
        return False, value
    pairs = [_accept(t, v) for t, v in zip(element_types, value, strict=True)]
    return all(good for good, _ in pairs), [v for _, v in pairs]


def _describe(option: Any) -> str:
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option)))
    if origin is tuple:
        args = typing.get_args(option)
        if args[-1] is Ellipsis:
            return f"a list of {args[0].__name__}"
        return f"a list of {len(args)} {args[0].__name__}"
    names = {types.NoneType: "null", int: "an integer", float: "a finite number", bool: "true or false"}
    return names.get(option, "a string" if option is str else option.__name__)
