"""A file of JSON objects, one per line. The file only grows, and a failed write never stops the run."""

import contextlib
import json
import logging
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from acrlpd.files import write_text_atomically

logger = logging.getLogger(__name__)


class JsonLinesFile:
    """Appends whole lines, each handed to the system at once: a kill loses at most the line being written.

    A disk that is full or gone is reported once. Lines that could not be written are kept, and are written
    together with the next line.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        """`path` is None on processes that do not log: then nothing is written."""
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
        """Makes these entries the whole content, at once."""
        if self._path is not None:
            write_text_atomically(self._path, "".join(map(_dump, entries)))

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
        raise ValueError(f"{path}: line {number} is damaged (not a JSON object); remove this line")
    return entry


def _dump(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _append_all(path: pathlib.Path, content: bytes) -> None:
    """Writes all of the content or nothing: a part that still fitted on a full disk is removed again."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = file.write(content)
            if written < len(content):
                raise OSError(f"only {written} of {len(content)} bytes fit")
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                file.truncate(size)
            raise
