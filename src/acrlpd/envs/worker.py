"""The process in which some of the environments of a pool live. It imports no JAX."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from acrlpd.envs.env import Env

# What a pool asks of an environment: function(env, *args).
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class EnvSlots:
    """Environments by slot. An error leaves an environment in an unknown state, so a new one takes its place."""

    def __init__(self, make: Callable[[], Env], slots: list[int]) -> None:
        self._make = make
        self._envs = {slot: make() for slot in slots}
        self.spec = self._envs[slots[0]].spec

    def run(self, slot: int, call: Call) -> tuple[Any, str | None]:
        """(result, None), or (None, what went wrong)."""
        function, args = call
        try:
            return function(self._envs[slot], *args), None
        except Exception as error:  # whatever a simulator raises costs one episode, not the run
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        self._envs[slot].close()
        self._envs[slot] = self._make()
        return None, message

    def close(self) -> None:
        for env in self._envs.values():
            env.close()


def work(connection: Connection, make: Callable[[], Env], slots: list[int], render_threads: int) -> None:
    """Sends ("ready", spec, False) once, then (slot, result, error) for every (slot, call); None ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    # Software rendering in every process would otherwise use every core.
    os.environ.setdefault("LP_NUM_THREADS", str(render_threads))
    try:
        envs = EnvSlots(make, slots)
    except Exception as error:  # the parent raises it
        connection.send(("failed", f"{error}" or type(error).__name__, isinstance(error, ImportError)))
        return
    connection.send(("ready", envs.spec, False))
    try:
        while (message := connection.recv()) is not None:
            slot, call = message
            connection.send((slot, *envs.run(slot, call)))
    except (EOFError, BrokenPipeError):  # the parent has ended
        sys.exit(1)
    envs.close()
