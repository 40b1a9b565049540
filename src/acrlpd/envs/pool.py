"""Several environments at once, in processes of their own or in this process.

The environments are numbered slots. A slot executes one call at a time and answers with the result or with an
`EnvFailure`. An environment that raises an error is replaced by a new one. A process that dies or hangs is started
again, and the slots that lost their episode answer their next call with an `EnvFailure`.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import connection
from typing import Any, Unpack

from acrlpd.cores import usable_cores
from acrlpd.envs.env import Env, EnvError, EnvSpec
from acrlpd.envs.registry import EnvOptions, bind_env
from acrlpd.envs.worker import Call, EnvFailure, EnvSlots, work

logger = logging.getLogger(__name__)

# Importing a simulator and building its model takes this long at most, on a busy machine.
_START_TIMEOUT_S = 300.0


class EnvPool(contextlib.AbstractContextManager["EnvPool"]):
    """`num_envs` environments of one kind in `num_workers` processes; with 0 processes they live in this one."""

    def __init__(
        self,
        name: str,
        num_envs: int,
        *,
        num_workers: int | None = None,
        timeout_s: float = 60.0,
        **options: Unpack[EnvOptions],
    ) -> None:
        """`num_workers` None means one process per core, but at most one per environment.

        A process whose call takes longer than `timeout_s` is killed; without processes there is no time-out.
        """
        if num_envs < 1:
            raise EnvError(f"a pool needs at least one environment; found num_envs {num_envs}")
        if num_workers is not None and num_workers < 0:
            raise EnvError(f"num_workers must be at least 0, which means this process; found {num_workers}")
        if not timeout_s > 0:
            raise EnvError(f"a time-out must be above 0 seconds; found {timeout_s:g}")
        make = bind_env(name, **options)
        self.name = name
        self.num_envs = num_envs
        self.num_workers = min(num_envs, usable_cores() if num_workers is None else num_workers)
        self.failures: list[EnvFailure] = []
        self._backend = (
            _Processes(name, make, num_envs, self.num_workers, timeout_s)
            if self.num_workers
            else EnvSlots(make, list(range(num_envs)))
        )
        self.spec: EnvSpec = self._backend.spec

    def submit(self, slot: int, function: Callable[..., Any], *args: Any) -> None:
        """Asks an idle slot for `function(env, *args)`."""
        self._backend.submit(slot, (function, args))

    def next_result(self) -> tuple[int, Any]:
        """Waits until any slot answers: the slot, and its result or an `EnvFailure`."""
        slot, result = self._backend.next_result()
        if isinstance(result, EnvFailure):
            self.failures.append(result)
            logger.warning("%s: slot %d lost its episode: %s", self.name, slot, result.reason)
        return slot, result

    def run(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Executes slot -> (function, *args) in several slots at once and waits for all of them."""
        for slot, (function, *args) in calls.items():
            self.submit(slot, function, *args)
        results = dict(self.next_result() for _ in calls)
        return {slot: results[slot] for slot in calls}

    def run_in_order(self, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Executes calls (function, *args), each in any slot, and yields their results in the order of the calls.

        A call that fails is executed once more. The result of a call that failed twice is its `EnvFailure`. At most
        twice as many calls as there are slots are ahead of the result that comes next, which limits memory.
        """
        numbered = enumerate(calls)
        running: dict[int, tuple[int, tuple[Any, ...]]] = {}  # slot -> number and call
        finished: dict[int, Any] = {}
        repeated: set[int] = set()
        num_begun = num_yielded = 0
        while True:
            idle = [slot for slot in range(self.num_envs) if slot not in running]
            room = num_yielded + 2 * self.num_envs - num_begun
            for slot, (number, call) in zip(idle[:room], numbered, strict=False):
                running[slot], num_begun = (number, call), number + 1
                self.submit(slot, *call)
            if not running:
                return
            slot, result = self.next_result()
            number, call = running.pop(slot)
            if isinstance(result, EnvFailure) and number not in repeated:
                repeated.add(number)
                running[slot] = number, call
                self.submit(slot, *call)
                continue
            finished[number] = result
            while num_yielded in finished:
                num_yielded += 1
                yield finished.pop(num_yielded - 1)

    def close(self) -> None:
        self._backend.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: connection.Connection
    slots: list[int]
    pending: set[int] = dataclasses.field(default_factory=set)  # slots with a call under way
    # When the worker last answered, or was given a call while idle; by the monotonic clock.
    waiting_since: float = 0.0

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


class _Processes:
    """Spreads slots over worker processes; a worker executes its calls in the order of their arrival."""

    def __init__(self, name: str, make: Callable[[], Env], num_envs: int, num_workers: int, timeout_s: float) -> None:
        try:
            pickle.dumps(make)  # multiprocessing would fail inside the child without saying why
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvError(
                f"environment {name!r} cannot be made in another process: {error}. Define the function given to "
                "register_env at the top level of a module, or use num_workers 0"
            ) from error
        self._name = name
        self._make = make
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("spawn")
        self._render_threads = max(1, usable_cores() // num_workers)
        self._results: deque[tuple[int, Any]] = deque()
        # Idle slots whose episode was lost with their process -> the reason, which their next failure reports.
        self._lost: dict[int, str] = {}
        self._workers: list[_Worker] = []
        try:
            # Start all processes before waiting for the first, so that they build their environments in parallel.
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
            worker.waiting_since = time.monotonic()
        worker.pending.add(slot)
        with contextlib.suppress(OSError):  # the process has died; `next_result` notices
            worker.connection.send((slot, call))

    def next_result(self) -> tuple[int, Any]:
        while not self._results:
            self._wait()
        return self._results.popleft()

    def _wait(self) -> None:
        """Waits for an answer, the death of a process, or a time-out."""
        busy = [worker for worker in self._workers if worker.pending]
        if not busy:
            raise RuntimeError("next_result was called, but no slot has a call under way")
        deadline = min(worker.waiting_since for worker in busy) + self._timeout_s
        ready = connection.wait([w.connection for w in busy], max(0.0, deadline - time.monotonic()))
        now = time.monotonic()  # before restarts, which take time in which other workers may answer
        for worker in busy:
            if worker.connection in ready:
                self._receive(worker)
            elif now > worker.waiting_since + self._timeout_s:
                self._restart(worker, f"no answer for {self._timeout_s:g} s; its process was killed and restarted")

    def _receive(self, worker: _Worker) -> None:
        try:
            slot, result = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            self._restart(worker, f"its process died (exit code {worker.process.exitcode}) and was restarted")
            return
        worker.pending.discard(slot)
        worker.waiting_since = time.monotonic()
        reason = self._lost.pop(slot, None)
        if reason is not None and isinstance(result, EnvFailure):
            result = EnvFailure(slot, reason)
        self._results.append((slot, result))

    def _restart(self, worker: _Worker, reason: str) -> None:
        """Starts a new process. The calls of the old one have failed, and its other slots lost their episodes."""
        for slot in worker.slots:
            if slot in worker.pending:
                self._results.append((slot, EnvFailure(slot, reason)))
            else:
                self._lost[slot] = reason
        worker.kill()
        fresh = self._launch(worker.slots)
        worker.process, worker.connection, worker.pending = fresh.process, fresh.connection, set()
        self._await_ready(worker)

    def _launch(self, slots: list[int]) -> _Worker:
        ours, theirs = self._context.Pipe()
        args = (theirs, self._make, slots, self._render_threads)
        process = self._context.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()  # the connection then ends with the child
        return _Worker(process, ours, slots)

    def _await_ready(self, worker: _Worker) -> EnvSpec:
        if not worker.connection.poll(_START_TIMEOUT_S):
            raise EnvError(f"environment {self._name!r} was not ready after {_START_TIMEOUT_S:g} s")
        try:
            spec = worker.connection.recv()
        except EOFError:
            worker.process.join(5)
            raise EnvError(
                f"the process of environment {self._name!r} died while starting (exit code "
                f"{worker.process.exitcode}); its output above says why. A script that uses parallel "
                "environments needs `if __name__ == '__main__':` around its main part"
            ) from None
        if isinstance(spec, Exception):
            raise spec
        return spec

    def close(self) -> None:
        """Ends all processes. An idle one closes its environments first; nobody waits for the call of a busy one."""
        for worker in self._workers:
            if worker.pending:
                worker.kill()
        idle = [worker for worker in self._workers if not worker.pending]
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        for worker in idle:
            worker.process.join(5)
            worker.kill()
