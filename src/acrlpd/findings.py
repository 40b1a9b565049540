"""What a check of a config finds."""

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
