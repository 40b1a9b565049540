"""One process at a time in a directory that takes long to fill."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from acrlpd.data.source import DatasetError

LOCK = ".lock"


@contextlib.contextmanager
def only_one(directory: Path, doing: str) -> Iterator[None]:
    """Refuses where another process is `doing` it here already; the lock of a killed one is gone with it."""
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatasetError(f"{directory}: another process is {doing}") from None
        yield
