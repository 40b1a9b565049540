"""How the project writes files: whole or not at all, and one process at a time in a directory."""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

LOCK = ".lock"


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


def copy_directory(source: Path, target: Path) -> None:
    """Copies a directory so that `target` is complete or absent, also after a kill; an earlier `target` is replaced."""
    temporary = target.with_name(target.name + ".copy")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, temporary)
    temporary.replace(target)


@contextlib.contextmanager
def only_one(directory: Path, doing: str, error_type: type[ValueError]) -> Iterator[None]:
    """Raises an error if another process holds the lock of `directory`, because it is `doing` the same.

    The system frees the lock of a process that is killed.
    """
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error_type(f"{directory}: another process is {doing}") from None
        except OSError as error:  # Not every file system of a cluster has locks.
            logger.warning("%s cannot be locked (%s): make sure that no other process works there", directory, error)
        yield
