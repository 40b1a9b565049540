"""The host's allocator, told what training on a CPU is like."""

import ctypes

import jax

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MIB = 2**20


def keep_freed_memory() -> None:
    """Lets the process keep what an update frees, because the next update asks for the same again.

    By default glibc gives large buffers back to the system, which then clears every page of them anew: a
    fifth of the time of a small update on a CPU. Other allocators are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if jax.default_backend() != "cpu" or mallopt is None:
        return
    for parameter, value in ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 1024 * _MIB), (_TOP_PAD, 128 * _MIB)):
        mallopt(parameter, value)
