"""What a check of a config finds."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

Level = Literal["error", "warning"]


class Finding(NamedTuple):
    """One thing that is wrong with a config: an error stops a run, a warning is only shown."""

    level: Level
    message: str


def error(message: str) -> Finding:
    return Finding("error", message)


def warning(message: str) -> Finding:
    return Finding("warning", message)


def at_least(minimum: float, **values: float) -> Iterator[Finding]:
    """Field names are given with double underscores for dots."""
    for name, value in values.items():
        if value < minimum:
            yield error(f"{name.replace('__', '.')} must be at least {minimum}; found {value}")
