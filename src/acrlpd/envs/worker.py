"""The process that some of the environments of a pool live in. Imports no JAX."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from acrlpd.envs.env import Env, EnvSpec

# What a pool is asked to do: function(env, *args).
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class EnvSlots:
    """Environments by slot, which are made anew after an error: nobody knows what state it left behind."""

    def __init__(self, make: Callable[[], Env], slots: list[int]) -> None:
        self._make = make
        self._envs = {slot: make() for slot in slots}

    @property
    def spec(self) -> EnvSpec:
        return next(iter(self._envs.values())).spec

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
    """Answers ("ready", spec) once, then (slot, result, error) for every (slot, call), until told None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    # Software rendering takes every core unless told otherwise, in every process.
    os.environ.setdefault("LP_NUM_THREADS", str(render_threads))
    try:
        envs = EnvSlots(make, slots)
    except Exception as error:  # sent to the parent, which raises it there
        connection.send(("failed", f"{error}" or type(error).__name__, isinstance(error, ImportError)))
        return
    connection.send(("ready", envs.spec, False))
    try:
        while (message := connection.recv()) is not None:
            slot, call = message
            connection.send((slot, *envs.run(slot, call)))
    except (EOFError, BrokenPipeError):  # the parent is gone
        sys.exit(1)
    envs.close()
