"""Collections that may be interrupted: the directory of what is there so far, and the settings that it belongs to."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acrlpd.envs.env import EnvError
from acrlpd.files import LOCK, only_one, read_json_object


@contextlib.contextmanager
def partial_directory(output: Path, doing: str) -> Iterator[Path]:
    """The directory of the episodes so far, for one process: two would overwrite each other's files.

    A directory without an episode, with settings at most, is removed in the end: nothing in it is worth continuing.
    """
    directory = output.with_name(output.name + ".partial")
    directory.mkdir(parents=True, exist_ok=True)
    with only_one(directory, f"{doing}; wait until it is done", EnvError):
        try:
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise EnvError(f"{output} exists already; choose another directory or remove it")
            yield directory
        finally:
            if directory.exists() and all(p.name == LOCK or p.suffix == ".json" for p in directory.iterdir()):
                shutil.rmtree(directory)


def settings_text(settings: Any) -> str:
    """The settings, a dataclass, as they are stored."""
    return json.dumps(dataclasses.asdict(settings), indent=2)


def require_equal_settings(file: Path, settings: Any, what: str) -> None:
    """Refuses to go on with what was begun with other settings; `what` says what the directory of `file` holds."""
    found, wanted = read_json_object(file), json.loads(settings_text(settings))
    for key in wanted:
        if wanted[key] != found.get(key):
            raise EnvError(
                f"{file.parent} holds {what} with other settings: {key} was {found.get(key)!r} and is "
                f"{wanted[key]!r}. Remove the directory to start again"
            )
