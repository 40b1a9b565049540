"""The values that a trial may draw for one key: a range of numbers, or a list of choices.

Optuna knows only choices that are plain values. Choices therefore go to Optuna as JSON, so that a choice may also be a
list such as `hidden_dims`.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

import optuna

from acrlpd.choice import hint
from acrlpd.config.tree import ConfigError, type_options


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two ends, which belong to the range. Integers, if both ends are integers."""

    low: float
    high: float
    log: bool = False

    def to_optuna(self) -> optuna.distributions.BaseDistribution:
        if isinstance(self.low, int):
            return optuna.distributions.IntDistribution(self.low, int(self.high), log=self.log)
        return optuna.distributions.FloatDistribution(self.low, self.high, log=self.log)

    def to_plain(self) -> dict[str, Any]:
        """The range as a space file writes it."""
        return {"low": self.low, "high": self.high} | ({"log": True} if self.log else {})

    @property
    def extremes(self) -> tuple[Any, ...]:
        """A config that accepts these values accepts every value of the range."""
        return self.low, self.high

    def __contains__(self, value: Any) -> bool:
        return is_number(value) and self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Choices:
    """One of several values."""

    values: tuple[Any, ...]

    def to_optuna(self) -> optuna.distributions.BaseDistribution:
        return optuna.distributions.CategoricalDistribution(list(map(json.dumps, self.values)))

    def to_plain(self) -> list[Any]:
        """The choices as a space file writes them."""
        return list(self.values)

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values

    def __contains__(self, value: Any) -> bool:
        return json.dumps(value) in map(json.dumps, self.values)


Distribution = Range | Choices


def to_param(distribution: Distribution, value: Any) -> Any:
    """A value as Optuna keeps it."""
    return json.dumps(value) if isinstance(distribution, Choices) else value


def from_param(distribution: Distribution, param: Any) -> Any:
    """The inverse of `to_param`."""
    return json.loads(param) if isinstance(distribution, Choices) else param


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def create_range(fields: Mapping[str, Any], annotation: Any) -> Range:
    """The range that a space file writes as `{low, high, log}`, of the type of the config's field."""
    known = [field.name for field in dataclasses.fields(Range)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"a range has {', '.join(known)}; found {name!r}{hint(name, known)}")
    missing = [name for name in ("low", "high") if name not in fields]
    if missing:
        raise ConfigError(f"a range needs low and high; {' and '.join(missing)} is missing")
    low, high, log = fields["low"], fields["high"], fields.get("log", False)
    kinds = [kind for kind in (int, float) if kind in type_options(annotation)]
    if not kinds:
        raise ConfigError(f"a range is for numbers; list choices here: [first, second]{_choices(annotation)}")
    is_integer = kinds == [int]
    for name, end in (("low", low), ("high", high)):
        if isinstance(end, bool) or not isinstance(end, int if is_integer else int | float):
            raise ConfigError(f"{name} must be {'an integer' if is_integer else 'a number'}; found {end!r}")
    if not isinstance(log, bool):
        raise ConfigError(f"log must be true or false; found {log!r}")
    if not low < high:
        raise ConfigError(f"the range is empty: low {low} must be below high {high}")
    if log and low <= 0:
        raise ConfigError(f"a range with log needs a low above 0; found {low}")
    return Range(low, high, log) if is_integer else Range(float(low), float(high), log)


def create_choices(values: list[Any]) -> Choices:
    """The choices that a space file writes as a list."""
    if len({json.dumps(value) for value in values}) < len(values):
        raise ConfigError(f"a choice is listed twice in {values}")
    if len(values) < 2:
        raise ConfigError(f"a search needs at least two choices; found {values}")
    return Choices(tuple(values))


def _choices(annotation: Any) -> str:
    named = [c for o in type_options(annotation) if typing.get_origin(o) is typing.Literal for c in typing.get_args(o)]
    return f"; the key may be {', '.join(map(str, named))}" if named else ""
