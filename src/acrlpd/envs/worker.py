"""Environments of a pool in one process, and the loop of a process that holds some of them. No JAX here."""

import dataclasses
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from acrlpd.envs.env import Env, EnvError

# What a pool asks of an environment: function(env, *args).
Call = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class EnvFailure:
    """A slot lost its episode."""

    slot: int
    reason: str


class EnvSlots:
    """Environments by slot. A call is executed when its result is asked for.

    An error leaves an environment in an unknown state, so a new one takes its place.
    """

    def __init__(self, make: Callable[[], Env], slots: list[int]) -> None:
        self._make = make
        self._envs = {slot: make() for slot in slots}
        self._calls: deque[tuple[int, Call]] = deque()
        self.spec = self._envs[slots[0]].spec

    def submit(self, slot: int, call: Call) -> None:
        self._calls.append((slot, call))

    def next_result(self) -> tuple[int, Any]:
        """The slot of the oldest call, and its result or an `EnvFailure`."""
        slot, (function, args) = self._calls.popleft()
        try:
            return slot, function(self._envs[slot], *args)
        except Exception as error:  # whatever a simulator raises costs one episode, not the run
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        try:
            self._envs[slot].close()
        except Exception as error:  # a simulator that has failed may not end well either
            reason += f". Then its close raised {type(error).__name__}: {error}"
        self._envs[slot] = self._make()
        return slot, EnvFailure(slot, reason)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()


def work(connection: Connection, make: Callable[[], Env], slots: list[int], render_threads: int) -> None:
    """Sends the spec or an error, then (slot, result) for every (slot, call); None ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    # Software rendering in every process would otherwise use every core.
    os.environ.setdefault("LP_NUM_THREADS", str(render_threads))
    try:
        envs = EnvSlots(make, slots)
    except Exception as error:  # the parent raises it
        kind = ImportError if isinstance(error, ImportError) else EnvError
        connection.send(kind(f"{error}" or type(error).__name__))
        return
    connection.send(envs.spec)
    try:
        while (message := connection.recv()) is not None:
            envs.submit(*message)
            connection.send(envs.next_result())
    except (EOFError, BrokenPipeError):  # the parent has ended
        sys.exit(1)
    envs.close()
