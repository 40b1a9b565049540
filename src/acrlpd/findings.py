"""What a check of a config finds, and how the finding is said."""

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One thing wrong with a config."""

    level: Literal["error", "warning"]
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


def check_warmup(name: str, warmup_steps: int, num_train_steps: int) -> Iterator[Finding]:
    if warmup_steps >= max(num_train_steps, 1):
        yield warning(f"{name}.warmup_steps {warmup_steps} is not over within the {num_train_steps} steps")
