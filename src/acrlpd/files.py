"""How the project names and writes files: within a directory, whole or not at all, line by line."""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

LOCK = ".lock"
_LONGEST_NAME = 255  # bytes; what Linux file systems allow


def is_plain_name(name: str) -> bool:
    """Whether a text that others chose may be the name of a file or directory: one part of a path, printable."""
    return (
        name not in ("", ".", "..")
        and not set(name) & set("/\\")
        and name.isprintable()
        and len(name.encode()) <= _LONGEST_NAME
    )


def are_plain_names(names: str) -> bool:
    """Whether a text is one or more plain names with slashes in between."""
    return all(is_plain_name(name) for name in names.split("/"))


def path_within(directory: Path, names: str, what: str) -> Path:
    """The path below `directory` that consists of `names`, which others chose; `what` says what the names are.

    Raises ValueError for names that lead out of the directory. A symbolic link in the directory may lead anywhere,
    because only the owner of the directory can make a link there.
    """
    if not are_plain_names(names):
        raise ValueError(
            f"{what} is {names[:200]!r}, expected plain names with single slashes between them: a path within "
            f"{directory}, without '..'"
        )
    return directory / names


def is_whole_number(text: str) -> bool:
    """Whether a text, such as the name of a checkpoint's directory, is a whole number as Python writes it.

    `str.isdigit` is true for characters such as "²", which `int` refuses.
    """
    return re.fullmatch("0|[1-9][0-9]{0,17}", text) is not None


def cache_directory() -> Path:
    """Where acrlpd keeps what it can make or fetch again: acrlpd/ in $XDG_CACHE_HOME, or else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "acrlpd"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Gives a file its name only when all of its content is on disk; what is left of a failed write is removed."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_text_atomically(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ValueError if the file holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    return content


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to write to, which is called `target` from the end of the `with` statement on: complete or absent.

    An empty directory of this name is replaced. What an earlier process has left unfinished is removed.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_directory(source: Path, target: Path) -> None:
    """Copies a directory so that `target` is complete or absent, also after a kill; an earlier `target` is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    with new_directory(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)


def link_directory(source: Path, target: Path, left_out: Collection[str] = ()) -> None:
    """Gives the files of a directory, which never change, a second place; `left_out` are names that stay out.

    Both places have the same files (hard links), or copies if they are on different file systems. Files that are in
    `target` already stay as they are.
    """

    def link(file: str, place: str) -> None:
        if Path(place).exists():
            return
        try:
            os.link(file, place)
        except OSError:
            shutil.copy2(file, place)

    shutil.copytree(
        source,
        target,
        ignore=lambda _, names: set(names).intersection(left_out),
        copy_function=link,
        dirs_exist_ok=True,
    )


@contextlib.contextmanager
def only_one(directory: Path, doing: str, error_type: type[ValueError]) -> Iterator[None]:
    """Raises an error if another process holds the lock of `directory`; `doing` says what that process does.

    The system frees the lock of a process that is killed.
    """
    path = directory / LOCK
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error_type(f"{directory}: another process is {doing}") from None
        except OSError as error:  # Not every file system of a cluster has locks.
            logger.warning("%s cannot be locked (%s): make sure that no other process works there", directory, error)
        # A process that ends may remove the file after it was opened here. The lock of such a file keeps nobody out.
        if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            raise error_type(f"{directory}: another process has just removed what was here; start again")
        yield


class JsonLinesFile:
    """A file of JSON objects, one per line, to which whole lines are appended.

    Each line is handed to the system at once: a kill loses at most the line being written. A disk that is full or
    gone is reported once. Lines that could not be written are kept, and are written together with the next line.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None on processes that do not log: then nothing is written."""
        self._path = path
        self._backlog: list[str] = []
        self._has_failed = False

    def append(self, entry: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        self._backlog.append(_dump(entry))
        self.flush()

    def flush(self) -> None:
        """Tries again to write the lines that could not be written, if there are any."""
        if self._path is None or not self._backlog:
            return
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


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file; a last line that a kill cut off is left out."""
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_load(line, path, number) for number, line in enumerate(lines, 1) if line]


def _load(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is damaged ({error}); remove this line") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: line {number} is damaged (not a JSON object); remove this line")
    return entry


def _dump(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _append_all(path: Path, content: bytes) -> None:
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
