"""Settings of a process: where its messages go, how it compiles programs and keeps them, how it frees memory."""

import contextlib
import contextvars
import ctypes
import logging
import pathlib
import platform
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from acrlpd.files import cache_directory
from acrlpd.text import PrintableFormatter, print

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MIB = 2**20

# The run that messages are about, where several runs share a process.
_run_name: contextvars.ContextVar[str | None] = contextvars.ContextVar("run_name", default=None)


def setup_process() -> None:
    """What a process that trains does first; calling this again changes nothing."""
    setup_logging()
    enable_compilation_cache()
    keep_freed_memory()
    allow_open_files()


def setup_logging() -> None:
    """Shows the messages of acrlpd on stderr; processes other than the first show warnings and errors only."""
    # Orbax reports every step that it takes, and every error that it raises, with its traceback.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    package = logging.getLogger("acrlpd")
    package.setLevel(logging.INFO if jax.process_index() == 0 else logging.WARNING)
    if not package.handlers:
        handler = _StderrHandler()
        prefix = f"[{jax.process_index()}] " if jax.process_count() > 1 else ""
        handler.setFormatter(PrintableFormatter(f"{prefix}%(message)s"))
        package.addHandler(handler)
        package.propagate = False
        sys.unraisablehook = _without_late_arrays(sys.unraisablehook)


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces so that messages appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        run = _run_name.get()
        # stderr may be a file on a disk that is full, or a terminal that is gone. The run goes on without its messages.
        with contextlib.suppress(OSError):
            print(self.format(record) if run is None else f"{run}: {self.format(record)}", file=sys.stderr)


@contextlib.contextmanager
def messages_of_run(name: str) -> Iterator[None]:
    """Puts the name of a run before the messages that are shown meanwhile."""
    token = _run_name.set(name)
    try:
        yield
    finally:
        _run_name.reset(token)


def _without_late_arrays(report: Callable[[Any], object]) -> Callable[[Any], object]:
    """Leaves out what tensorstore says of arrays that end after Orbax has given up on a checkpoint or a full disk.

    Orbax closes its event loop with the first error. tensorstore prints a traceback for each array that finds the loop
    closed, and the message that names the file would stand among dozens of them.
    """

    def hook(unraisable: Any) -> None:
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    return hook


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next process with the same program does not compile it again.

    A directory, and a least compile time below ours, that the environment names for JAX stay as they are.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla" / _processor_name()))
    least_time = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min(least_time, 0.5))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def compile_fast() -> dict[str, Any] | None:
    """Compiler options for a program that runs a few times: on CPUs, its optimisation takes longer than its runs."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def _processor_name() -> str:
    """Programs are compiled for one kind of processor; machines of several kinds may share a home directory."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return f"{platform.machine()}-{zlib.crc32(flags.encode()):08x}"


def keep_freed_memory() -> None:
    """On a CPU, lets the process keep the memory that an update frees, because the next update needs it again.

    By default glibc gives large buffers back to the system, and the system clears every page before it hands
    the page out again: a fifth of the time of a small update. Other allocators stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if jax.default_backend() != "cpu" or mallopt is None:
        return
    for parameter, value in ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 1024 * _MIB), (_TOP_PAD, 128 * _MIB)):
        mallopt(parameter, value)


def allow_open_files() -> None:
    """Lets the process open as many files as the system allows. The usual limit is 1,024.

    The readers of a frame cache keep its shards open, and a run has two readers, one of them for the held-out episodes.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:  # macOS says so, and refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
