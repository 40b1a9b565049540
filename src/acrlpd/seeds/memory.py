"""The seeds' memory monitor. A run records memory with every line of metrics, so none of this is needed in a run."""

import logging
from typing import Any

import jax

from acrlpd.monitoring.run_monitor import DeviceMemory, device_memory

logger = logging.getLogger(__name__)
_MIB = 2**20


class GPUMemoryMonitor:
    """Remembers what the devices held at named moments."""

    def __init__(self) -> None:
        self.checkpoints: list[tuple[str, DeviceMemory, dict[str, dict[str, float]]]] = []

    def checkpoint_memory(self, name: str, train_state: Any = None) -> None:
        """Remembers the memory of this moment and, if a state is given, what the state is made of."""
        parts = {} if train_state is None else self.analyze_train_state_memory(train_state)
        self.checkpoints.append((name, device_memory(), parts))

    def analyze_train_state_memory(self, train_state: Any) -> dict[str, dict[str, float]]:
        """MiB of each part of an agent: in all, and on the first device."""
        first = jax.local_devices()[0]
        found: dict[str, dict[str, float]] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(train_state)[0]:
            part = found.setdefault(jax.tree_util.keystr(path[:1], simple=True), {"total_mib": 0.0, "device_mib": 0.0})
            part["total_mib"] += leaf.nbytes / _MIB
            held = [shard.data.nbytes for shard in leaf.addressable_shards if shard.device == first]
            part["device_mib"] += sum(held) / _MIB
        return found

    def get_memory_report(self) -> str:
        """One line for each moment, and one for each part of a state."""
        lines: list[str] = []
        for name, memory, parts in self.checkpoints:
            lines.append(f"{name}: {memory}")
            lines += [f"  {part}: {sizes['total_mib']:.1f} MiB" for part, sizes in parts.items()]
        return "\n".join(lines)


memory_monitor = GPUMemoryMonitor()


def log_memory_usage(step: int, train_state: Any = None, phase: str = "training") -> None:
    """Remembers and logs the memory of a step."""
    memory_monitor.checkpoint_memory(f"{phase} step {step}", train_state)
    logger.info("%s step %d: %s", phase, step, memory_monitor.checkpoints[-1][1])


def log_gpu_memory(step_name: str) -> dict[str, float]:
    """Logs the memory of this moment; bytes by name, as far as the backend reports them."""
    memory = device_memory()
    logger.info("%s: %s", step_name, memory)
    return {name: float(value) for name, value in vars(memory).items() if value is not None}


def get_gpu_memory_usage() -> float:
    """MiB in use on the fullest device; 0 where the backend does not say, as on CPUs."""
    return (device_memory().in_use or 0) / _MIB
