"""Image buffers that go round: filled by the loader, read by the device, filled again.

A batch of images is hundreds of megabytes, and touching that much fresh memory costs as much as reading
the frames. When a buffer is free again is hard to know from outside (a transfer may still run, and on a
CPU the device array *is* the buffer), so a buffer comes back when the last array that looks at it dies.
"""

import math
import threading
import weakref
from typing import Any

import numpy as np

# JAX uses an aligned host buffer as it is on a CPU, without a copy.
_ALIGNMENT = 64


class BufferPool:
    """Recycles uint8 arrays by shape. Holds as many as were in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[np.ndarray]] = {}
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array of this shape with undefined content; goes back when it and its views are gone."""
        with self._lock:
            free = self._free.setdefault(shape, [])
            buffer = free.pop() if free else None
            if buffer is None:
                self.allocated_bytes += math.prod(shape)
        if buffer is None:
            buffer = _aligned_empty(shape)
        lease = _Lease(buffer)
        # No lock: the end of a loan may come at any moment, also while this thread holds it. Appending is atomic.
        weakref.finalize(lease, free.append, buffer).atexit = False
        return np.asarray(lease)


class _Lease:
    """What all views of a lent buffer have in common; its end is the end of the loan."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._buffer.__array_interface__


def _aligned_empty(shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].reshape(shape)
