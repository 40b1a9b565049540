"""One process at a time in a directory that takes long to fill."""

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from acrlpd.data.source import DatasetError

logger = logging.getLogger(__name__)

LOCK = ".lock"


@contextlib.contextmanager
def only_one(directory: Path, doing: str, error_type: type[ValueError] = DatasetError) -> Iterator[None]:
    """Refuses where another process is `doing` it here already; the lock of a killed one is gone with it."""
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error_type(f"{directory}: another process is {doing}") from None
        except OSError as error:  # not every file system of a cluster has locks
            logger.warning("%s cannot be locked (%s): see to it that no other process works there", directory, error)
        yield
