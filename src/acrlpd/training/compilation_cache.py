"""Compiled programs are kept between runs, so that a restart, an evaluation or an actor does not compile again."""

import os
import pathlib
import platform
import zlib

import jax


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, so that a restart does not compile again."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache / "acrlpd" / "xla" / _processor_name()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _processor_name() -> str:
    """Programs are compiled for the processor at hand; a home directory may be shared by several kinds."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return f"{platform.machine()}-{zlib.crc32(flags.encode()):08x}"
