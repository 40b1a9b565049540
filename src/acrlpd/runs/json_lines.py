"""A file of JSON objects, one per line, that only grows and never stops whoever writes to it."""

import contextlib
import json
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class JsonLinesFile:
    """Appends whole lines, each handed to the system at once: a kill loses at most the one being written.

    A disk that is full or gone is reported once; what could not be written is kept, and written with the
    next line that can be.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        """`path` None: on processes that do not log, nothing happens."""
        self._path = path
        self._backlog: list[str] = []
        self._has_failed = False

    def append(self, entry: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        self._backlog.append(_dump(entry))
        try:
            _append_all(self._path, "".join(self._backlog).encode())
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s cannot be written (%s); the run goes on, and tries again later", self._path, error)
            self._has_failed = True
        else:
            self._backlog = []

    def replace(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Makes these the whole content, at once."""
        if self._path is not None:
            temporary = self._path.with_name(self._path.name + ".tmp")
            temporary.write_text("".join(map(_dump, entries)))
            temporary.replace(self._path)

    def read(self) -> list[dict[str, Any]]:
        return [] if self._path is None else read_json_lines(self._path)


def read_json_lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file; a last line that a kill cut off is left out."""
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_load(line, path, number) for number, line in enumerate(lines, 1) if line]


def _load(line: bytes, path: pathlib.Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is damaged ({error}); remove this line") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: line {number} is damaged (no JSON object); remove this line")
    return entry


def _dump(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _append_all(path: pathlib.Path, content: bytes) -> None:
    """All of it or nothing: what a full disk took of it is taken back."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        try:
            written = os.write(file, content)
            if written < len(content):
                raise OSError(f"only {written} of {len(content)} bytes fit")
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
