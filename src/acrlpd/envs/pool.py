"""Several environments at once, in processes of their own or in this one.

The environments are numbered slots; a slot is given one call at a time and answers with its result or with
an `EnvFailure`. An environment that raises is made anew, a process that dies or hangs is started again,
and whoever uses the pool is told which slots lost their episode.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

from acrlpd.envs.env import Env, EnvSpec
from acrlpd.envs.errors import EnvError
from acrlpd.envs.registry import IMAGE_SIZE, bind_env
from acrlpd.envs.worker import Call, EnvSlots, work

logger = logging.getLogger(__name__)

# Importing a simulator and building its model on a busy machine.
_START_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class EnvFailure:
    """A slot lost the episode it was in."""

    slot: int
    reason: str


class EnvPool:
    """`num_envs` environments of one kind in `num_workers` processes; 0: in this process."""

    def __init__(
        self,
        name: str,
        num_envs: int,
        *,
        num_workers: int | None = None,
        cameras: Sequence[str] | None = None,
        image_size: tuple[int, int] = IMAGE_SIZE,
        max_episode_steps: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """`num_workers` None: one process per core, at most one per environment.

        `timeout_s` is how long a call may take before its process is killed; in this process nobody can.
        """
        if num_envs < 1:
            raise EnvError(f"a pool needs at least one environment; found num_envs {num_envs}")
        if num_workers is not None and num_workers < 0:
            raise EnvError(f"num_workers must be at least 0, which means this process; found {num_workers}")
        if not timeout_s > 0:
            raise EnvError(f"a time-out must be above 0 seconds; found {timeout_s:g}")
        make = bind_env(name, cameras=cameras, image_size=image_size, max_episode_steps=max_episode_steps)
        self.name = name
        self.num_envs = num_envs
        self.failures: list[EnvFailure] = []
        workers = min(os.cpu_count() or 1, num_envs) if num_workers is None else min(num_workers, num_envs)
        self.num_workers = workers
        self._backend = _Processes(name, make, num_envs, workers, timeout_s) if workers else _InProcess(make, num_envs)

    @property
    def spec(self) -> EnvSpec:
        return self._backend.spec

    def submit(self, slot: int, function: Callable[..., Any], *args: Any) -> None:
        """Asks for `function(env, *args)` in a slot that has nothing to do."""
        self._backend.submit(slot, (function, args))

    def next_result(self) -> tuple[int, Any]:
        """Waits for any slot; its result, or an `EnvFailure`."""
        slot, result = self._backend.next_result()
        if isinstance(result, EnvFailure):
            self.failures.append(result)
            logger.warning("%s: slot %d lost its episode: %s", self.name, slot, result.reason)
        return slot, result

    def run(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Slot -> (function, *args) for several slots at once; waits for all of them."""
        for slot, (function, *args) in calls.items():
            self.submit(slot, function, *args)
        results = dict(self.next_result() for _ in calls)
        return {slot: results[slot] for slot in calls}

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _InProcess:
    """Calls are executed when their result is asked for."""

    def __init__(self, make: Callable[[], Env], num_envs: int) -> None:
        self._envs = EnvSlots(make, list(range(num_envs)))
        self.spec = self._envs.spec
        self._queue: deque[tuple[int, Call]] = deque()

    def submit(self, slot: int, call: Call) -> None:
        self._queue.append((slot, call))

    def next_result(self) -> tuple[int, Any]:
        slot, call = self._queue.popleft()
        result, error = self._envs.run(slot, call)
        return slot, result if error is None else EnvFailure(slot, error)

    def close(self) -> None:
        self._envs.close()


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: connection.Connection
    slots: list[int]
    pending: set[int]
    last_answer: float  # or last submission to an idle worker, by the monotonic clock


class _Processes:
    """Slots spread over worker processes; a worker does its calls in the order they came."""

    def __init__(self, name: str, make: Callable[[], Env], num_envs: int, num_workers: int, timeout_s: float) -> None:
        try:
            pickle.dumps(make)  # multiprocessing would fail inside the child, without a word about why
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvError(
                f"environment {name!r} cannot be made in another process: {error}. Define the function given to "
                "register_env at the top level of a module, or use num_workers 0"
            ) from error
        self._name = name
        self._make = make
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("spawn")
        self._render_threads = max(1, (os.cpu_count() or 1) // num_workers)
        self._results: deque[tuple[int, Any]] = deque()
        self._lost: dict[int, str] = {}  # slot -> why its episode is gone, although its last call went well
        self._workers: list[_Worker] = []
        try:
            # All of them first: they import and build at the same time.
            self._workers += [self._launch(list(range(i, num_envs, num_workers))) for i in range(num_workers)]
            for worker in self._workers:
                self.spec = self._await_ready(worker)
        except BaseException:
            self.close()
            raise
        self._of_slot = {slot: worker for worker in self._workers for slot in worker.slots}

    def submit(self, slot: int, call: Call) -> None:
        worker = self._of_slot[slot]
        if not worker.pending:
            worker.last_answer = time.monotonic()
        worker.pending.add(slot)
        with contextlib.suppress(OSError):  # it has died since its last answer; `next_result` finds out
            worker.connection.send((slot, call))

    def next_result(self) -> tuple[int, Any]:
        while not self._results:
            self._wait()
        return self._results.popleft()

    def _wait(self) -> None:
        """Until an answer, a death or a time-out."""
        busy = [worker for worker in self._workers if worker.pending]
        if not busy:
            raise RuntimeError("next_result without a call under way")
        deadline = min(worker.last_answer for worker in busy) + self._timeout_s
        ready = connection.wait([w.connection for w in busy], max(0.0, deadline - time.monotonic()))
        now = time.monotonic()  # restarting one worker takes its time, in which others may have answered
        for worker in busy:
            if worker.connection in ready:
                self._receive(worker)
            elif now > worker.last_answer + self._timeout_s:
                self._restart(worker, f"no answer for {self._timeout_s:g} s; its process was killed and restarted")

    def _receive(self, worker: _Worker) -> None:
        try:
            slot, result, error = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            self._restart(worker, f"its process died (exit code {worker.process.exitcode}) and was restarted")
            return
        worker.pending.discard(slot)
        worker.last_answer = time.monotonic()
        lost = self._lost.pop(slot, error)
        self._results.append((slot, result if error is None else EnvFailure(slot, lost or error)))

    def _restart(self, worker: _Worker, reason: str) -> None:
        """A new process; every call of the old one has failed, and its other slots lost their episodes."""
        for slot in sorted(worker.pending):
            self._results.append((slot, EnvFailure(slot, reason)))
        self._lost |= {slot: reason for slot in worker.slots if slot not in worker.pending}
        _kill(worker)
        fresh = self._launch(worker.slots)
        worker.process, worker.connection, worker.pending = fresh.process, fresh.connection, set()
        self._await_ready(worker)

    def _launch(self, slots: list[int]) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=work, args=(theirs, self._make, slots, self._render_threads), daemon=True
        )
        process.start()
        theirs.close()  # so that we notice when the child's end closes
        return _Worker(process, ours, slots, set(), time.monotonic())

    def _await_ready(self, worker: _Worker) -> EnvSpec:
        if not worker.connection.poll(_START_TIMEOUT_S):
            raise EnvError(f"environment {self._name!r} was not ready after {_START_TIMEOUT_S:g} s")
        try:
            kind, content, missing_package = worker.connection.recv()
        except EOFError:
            worker.process.join(5)
            raise EnvError(
                f"the process of environment {self._name!r} died while starting (exit code "
                f"{worker.process.exitcode}); its output above says why. A script that uses parallel "
                "environments needs `if __name__ == '__main__':` around its main part"
            ) from None
        if kind == "failed":
            raise ImportError(content) if missing_package else EnvError(content)
        return content

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        for worker in self._workers:
            worker.process.join(5)
            _kill(worker)


def _kill(worker: _Worker) -> None:
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.connection.close()
