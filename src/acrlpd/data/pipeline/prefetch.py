"""Threads that prepare the results of the next steps while the current one is being used."""

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Shared(Generic[T]):
    """What the threads see. They hold no reference to the Prefetcher, so dropping that stops them."""

    def __init__(self, build: Callable[[int], T], first_step: int, depth: int) -> None:
        self.build = build
        self.depth = depth
        self.wanted = first_step  # the step that the consumer takes next
        self.next_step = first_step  # the step that a thread takes next
        self.results: dict[int, T] = {}
        self.failures: dict[int, Exception] = {}
        self.closed = False
        self.changed = threading.Condition()

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.next_step < self.wanted + self.depth)
                if self.closed:
                    return
                step = self.next_step
                self.next_step += 1
            try:
                result = self.build(step)
            except Exception as error:  # raised again in the consumer
                error.add_note(f"while the batch of step {step} was prepared")
                with self.changed:
                    self.failures[step] = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.results[step] = result
                del result  # or it would live on while this thread waits
                self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.closed = True
            self.results.clear()
            self.changed.notify_all()


class Prefetcher(Generic[T]):
    """Results of `build(step)` for consecutive steps, in order, prepared ahead by threads.

    At most max(depth, num_workers) results exist beyond the one in use. Without workers they are built on
    demand. What a thread raises is raised by `get` for the step it belongs to.
    """

    def __init__(self, build: Callable[[int], T], *, first_step: int, num_workers: int, depth: int) -> None:
        self._shared = _Shared(build, first_step, max(depth, num_workers))
        self._threads = [
            threading.Thread(target=self._shared.work, name=f"acrlpd-data-{i}", daemon=True) for i in range(num_workers)
        ]
        # Also runs at interpreter exit, where a thread inside a device transfer would otherwise be cut off.
        self._close = weakref.finalize(self, _stop, self._shared, self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def step(self) -> int:
        """The step that `get` returns next."""
        return self._shared.wanted

    def get(self) -> T:
        """The result of the next step; waits for it."""
        shared = self._shared
        if not self._threads:
            result = shared.build(shared.wanted)
            shared.wanted += 1
            return result
        with shared.changed:
            step = shared.wanted
            shared.changed.wait_for(lambda: shared.closed or step in shared.results or step in shared.failures)
            if step in shared.failures:
                raise shared.failures[step]
            if shared.closed:
                raise RuntimeError("the data loader was closed")
            shared.wanted += 1
            shared.changed.notify_all()
            return shared.results.pop(step)

    def close(self) -> None:
        """Stops the threads and waits for them; results not taken are dropped."""
        self._close()


def _stop(shared: _Shared, threads: list[threading.Thread]) -> None:
    shared.stop()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
