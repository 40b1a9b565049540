"""How the project writes files: whole or not at all, and one process at a time in a directory."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

LOCK = ".lock"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Gives a file its name only when all of its content is on disk; a file that fails to be written is removed."""
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


@contextlib.contextmanager
def only_one(directory: Path, doing: str, error_type: type[ValueError]) -> Iterator[None]:
    """Refuses a directory in which another process is `doing` the same; a killed process leaves no lock behind."""
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error_type(f"{directory}: another process is {doing}") from None
        except OSError as error:  # not every file system of a cluster has locks
            logger.warning("%s cannot be locked (%s): make sure that no other process works there", directory, error)
        yield
