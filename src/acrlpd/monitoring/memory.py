"""Where device memory goes: what the allocator says, and what each part of the state takes."""

import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from acrlpd.config.plan.plan import format_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Of the local device that holds most; None where the backend does not say, as on CPUs."""

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


@dataclasses.dataclass(frozen=True)
class ComponentMemory:
    """One part of a train state."""

    num_arrays: int
    total_bytes: int  # each array counted once
    device_bytes: int  # on one device


class GPUMemoryMonitor:
    """A diary of device memory: named moments, and what the state took then."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, DeviceMemory, dict[str, ComponentMemory]]] = []

    def checkpoint_memory(self, name: str, train_state: Any = None) -> DeviceMemory:
        """Notes how much memory is in use now, and by which part of the state if one is given."""
        memory = device_memory()
        components = {} if train_state is None else self.analyze_train_state_memory(train_state)
        self.moments.append((name, memory, components))
        return memory

    def analyze_train_state_memory(self, train_state: Any) -> dict[str, ComponentMemory]:
        """Bytes per top-level field of a state (agent, dict, dataclass), largest first."""
        components: dict[str, ComponentMemory] = {}
        for path, array in jax.tree_util.tree_flatten_with_path(train_state)[0]:
            name = jax.tree_util.keystr(path[:1]).strip("[]'\".") if path else "state"
            old = components.get(name, ComponentMemory(0, 0, 0))
            components[name] = ComponentMemory(
                old.num_arrays + 1,
                old.total_bytes + math.prod(array.shape) * array.dtype.itemsize,
                old.device_bytes + _bytes_on_one_device(array),
            )
        return dict(sorted(components.items(), key=lambda item: -item[1].device_bytes))

    def get_memory_report(self) -> str:
        """All moments, with the parts of the state indented below."""
        lines = []
        for name, memory, components in self.moments:
            lines.append(f"{name}: {memory}")
            width = max(map(len, components), default=0)
            lines += [
                f"  {part:<{width}}  {format_bytes(c.device_bytes):>10} on a device, "
                f"{format_bytes(c.total_bytes):>10} in all, {c.num_arrays} arrays"
                for part, c in components.items()
            ]
        return "\n".join(lines)


def _bytes_on_one_device(array: Any) -> int:
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def log_memory_usage(step: int, train_state: Any = None, phase: str = "training") -> DeviceMemory:
    """One line in the log, with the parts of the state if it is given."""
    monitor = GPUMemoryMonitor()
    memory = monitor.checkpoint_memory(f"{phase} step {step}", train_state)
    logger.info("%s", monitor.get_memory_report())
    return memory
