"""How much memory this process and its devices hold."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import jax

from acrlpd.monitoring.units import format_bytes


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the local device that holds most; None where the backend does not report them, as on CPUs."""

    in_use: int | None
    peak: int | None
    limit: int | None
    host: int  # resident memory of this process

    def __str__(self) -> str:
        host = f"host {format_bytes(self.host)}"
        if self.in_use is None or self.peak is None:
            return f"device memory not reported by this backend, {host}"
        limit = "" if self.limit is None else f" of {format_bytes(self.limit)}"
        return f"device {format_bytes(self.in_use)}{limit}, peak {format_bytes(self.peak)}, {host}"


def device_memory() -> DeviceMemory:
    """What this process and its fullest device hold now."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    fullest: Mapping[str, int] = max(stats, key=lambda s: s.get("bytes_in_use", 0))
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return DeviceMemory(
        in_use=fullest.get("bytes_in_use"),
        peak=fullest.get("peak_bytes_in_use"),
        limit=fullest.get("bytes_limit"),
        host=pages * os.sysconf("SC_PAGE_SIZE"),
    )
