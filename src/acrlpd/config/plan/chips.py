"""Accelerators by name with the vendors' peak numbers, what a run reaches of them, and the memory of this machine."""

import dataclasses
import os
import re

import jax

from acrlpd.choice import hint
from acrlpd.config.tree import ConfigError

# Share of the device's memory that XLA may use: `acrlpd train` asks for this share, and the plan counts on it.
MEMORY_FRACTION = 0.92

# Share of peak that the train step reached on one H200 (benchmarks/plan_against_xla-*.md): in the large matrix products
# of prefix and backward pass, recomputation counted, and in the thin products of denoising candidates.
DENSE_EFFICIENCY = 0.55
CANDIDATE_EFFICIENCY = 0.34


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    memory_gib: float
    # Dense (not sparse) peak.
    bf16_tflops: float
    # Device memory, GB/s.
    bandwidth_gbs: float
    # To the other devices of the host, GB/s per device and direction.
    interconnect_gbs: float


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("A100-40GB", 40, 312, 1_555, 300),
        Chip("A100-80GB", 80, 312, 2_039, 300),
        Chip("H100", 80, 989, 3_350, 450),
        Chip("H200", 140, 989, 4_800, 450),
        Chip("B200", 179, 2_250, 8_000, 900),
        Chip("L40S", 45, 362, 864, 32),
        Chip("RTX-4090", 24, 165, 1_008, 32),
        Chip("RTX-5090", 32, 209, 1_792, 64),
        Chip("TPU-v5e", 16, 197, 819, 200),
        Chip("TPU-v5p", 95, 459, 2_765, 600),
        Chip("TPU-v6e", 32, 918, 1_640, 450),
    )
}
# JAX's names of TPUs -> ours.
_TPU_KINDS = {"TPU v5 lite": "TPU-v5e", "TPU v5": "TPU-v5p", "TPU v6 lite": "TPU-v6e"}


def find_chip(name: str) -> Chip:
    """By name, upper or lower case."""
    by_lower = {known.lower(): chip for known, chip in CHIPS.items()}
    if name.lower() not in by_lower:
        raise ConfigError(f"unknown accelerator {name!r}{hint(name.lower(), by_lower)}\nknown: {', '.join(CHIPS)}")
    return by_lower[name.lower()]


def find_device_chip(device_kind: str) -> Chip | None:
    """The chip behind JAX's name for a device, for example 'NVIDIA H200'; None if the chip is unknown."""
    if device_kind in _TPU_KINDS:
        return CHIPS[_TPU_KINDS[device_kind]]
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    fitting = [chip for chip in CHIPS.values() if set(chip.name.upper().split("-")) <= words]
    return max(fitting, key=lambda chip: len(chip.name), default=None)


def claim_device_memory() -> None:
    """Makes XLA take the share of a GPU that the plan counts on. Call this before JAX is first used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))


def usable_device_bytes() -> int:
    """Memory that a run may use on one device. CPU devices share the memory of the machine."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * MEMORY_FRACTION) // jax.local_device_count()
