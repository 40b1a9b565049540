"""How batches come ahead of the train step: threads that prepare them, and image buffers that are used again."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

# JAX uses an aligned host buffer on a CPU without a copy.
_ALIGNMENT = 64


class Prefetcher:
    """Results of `build(step)` for steps from `first_step` to before `end_step`, in order, prepared ahead by threads.

    At most max(depth, num_workers) results exist beyond the result in use. Without workers `get` builds each result.
    An error of a thread is raised by `get` for the step that the error belongs to. The threads hold no reference to
    the Prefetcher, so dropping the Prefetcher stops them.
    """

    def __init__(
        self,
        build: Callable[[int], Any],
        *,
        first_step: int,
        end_step: float = math.inf,
        num_workers: int,
        depth: int,
    ) -> None:
        self._step = first_step
        self._build = build
        self._end_step = end_step
        self._depth = max(depth, num_workers)
        self._threads = ThreadPoolExecutor(num_workers, "acrlpd-data") if num_workers else None
        self._ahead: deque[Future[Any]] = deque()  # from `step` on
        self._closed = False
        self._prepare_ahead()

    @property
    def step(self) -> int:
        """The step that `get` returns next."""
        if self._closed:
            raise RuntimeError("the data loader was closed")
        return self._step

    def get(self) -> Any:
        """The result of the next step; waits until the result is there."""
        step = self.step
        try:
            result = self._ahead[0].result() if self._threads else self._build(step)
        except Exception as error:
            error.add_note(f"while the batch of step {step} was prepared")
            raise
        if self._threads:
            self._ahead.popleft()
        self._step = step + 1
        self._prepare_ahead()
        return result

    def raise_depth(self, depth: int) -> None:
        """Prepares at least so many results ahead."""
        self._depth = max(self._depth, depth)
        self._prepare_ahead()

    def _prepare_ahead(self) -> None:
        while self._threads and len(self._ahead) < self._depth and self.step + len(self._ahead) < self._end_step:
            self._ahead.append(self._threads.submit(self._build, self.step + len(self._ahead)))

    def close(self) -> None:
        """Stops the threads and waits for their end; results that nobody took are dropped."""
        self._closed = True
        self._ahead.clear()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)


class BufferPool:
    """Image buffers that go round: filled by the loader, read by the device, filled again.

    A batch of images is hundreds of megabytes, and touching that much fresh memory costs as much as reading the frames.
    A caller cannot know when a buffer is free again: a transfer may still run, and on a CPU the device array *is* the
    buffer. So a buffer comes back when the last array that looks at it dies.

    The number of windows may change from batch to batch. So a buffer serves every shape that fits into it, and there
    are never more buffers than were lent at the same time.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []  # uint8 [bytes] each
        self._lock = threading.Lock()
        self.allocated_bytes = 0  # of all buffers, free and lent

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array of this shape with undefined content; it goes back when the array and its views are gone."""
        size = math.prod(shape)
        with self._lock:
            buffer = self._take_free_or_new(size)
        lease = _Lease(buffer[:size].reshape(shape))
        # No lock: a loan may end at any moment, also while this thread holds the lock. Appending is atomic.
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return np.asarray(lease)

    def _take_free_or_new(self, size: int) -> np.ndarray:
        """The smallest free buffer of at least `size` bytes. If all are smaller, a new one replaces the largest."""
        sizes = [len(buffer) for buffer in self._free]
        fitting = [place for place, found in enumerate(sizes) if found >= size]
        if fitting:
            return self._free.pop(min(fitting, key=sizes.__getitem__))
        if sizes:
            self.allocated_bytes -= len(self._free.pop(sizes.index(max(sizes))))
        self.allocated_bytes += size
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + size]


class _Lease:
    """All views of a lent buffer refer to the lease, so the end of the lease is the end of the loan."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._buffer.__array_interface__
