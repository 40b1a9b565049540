"""The time of a pool, moved by a test: how fast the machine is does not decide whether a process hangs."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from acrlpd.envs import pool

# The time-out of pools in these tests. A pool looks at its clock at least this often.
TIMEOUT_S = 0.2
# How long one process waits for another one, which is only slow on a busy machine.
WAIT_S = 120.0


class PoolTime:
    """Stands in for the module `time` in the pool. Time passes only while an environment says that it hangs.

    A process says so with a file in `directory` that is named after its process id.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 0.0

    def monotonic(self) -> float:
        if any(_is_alive(int(path.name.partition("-")[2])) for path in self.directory.glob("hanging-*")):
            self.now += TIMEOUT_S / 4
        return self.now


def use_pool_time(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Gives all pools the clock of the toy environments, which leave their files in `directory`."""
    monkeypatch.setenv("TOY_FAULTS", str(directory))
    monkeypatch.setattr(pool, "time", PoolTime(directory))


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:g} s for {path}")
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
