"""Accelerators by name with the vendors' peak numbers, the one that this process finds, and its memory."""

import dataclasses
import os
import re

import jax

from acrlpd.choice import hint
from acrlpd.config.tree import ConfigError

# Share of the device's memory that XLA may use: `acrlpd train` asks for this share, and the plan counts on it.
MEMORY_FRACTION = 0.92


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One accelerator, as its data sheet describes it."""

    name: str
    # What the driver reports; ECC takes a part of the memory of some cards.
    memory_gib: float
    # Peak of bfloat16 products that are summed in float32, dense. Vendors also print the double, for sparse matrices.
    bf16_tflops: float
    # Device memory, GB/s.
    bandwidth_gbs: float
    # To the other devices of the host, GB/s per device and direction.
    interconnect_gbs: float
    # Further names that no tolerance for spelling explains.
    also: tuple[str, ...] = ()


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("RTX-3090", 24, 71, 936, 32),
        Accelerator("RTX-3090-Ti", 24, 80, 1_008, 32, also=("3090Ti",)),
        Accelerator("RTX-4090", 24, 165, 1_008, 32),
        Accelerator("RTX-5090", 32, 209, 1_792, 64),
        Accelerator("A10", 22.5, 125, 600, 32),
        Accelerator("A10G", 22.5, 70, 600, 32),
        Accelerator("L4", 22.5, 121, 300, 32),
        Accelerator("A40", 45, 149.7, 696, 32),
        Accelerator("L40", 45, 181, 864, 32),
        Accelerator("L40S", 45, 362, 864, 32),
        Accelerator("A6000", 48, 155, 768, 32),
        Accelerator("RTX-6000-Ada", 48, 364, 960, 32),
        Accelerator("A100-40GB", 40, 312, 1_555, 300),
        Accelerator("A100-80GB", 80, 312, 2_039, 300),
        Accelerator("H100", 80, 989, 3_350, 450),
        Accelerator("H100-PCIe", 80, 756, 2_000, 64),
        Accelerator("H100-NVL", 93.5, 835, 3_900, 64),
        # The driver names this one after the memory of its processor; a later one has other memory, and is not known.
        Accelerator("GH200", 95.5, 989, 4_000, 450, also=("GH200 480GB",)),
        Accelerator("H200", 140, 989, 4_800, 450),
        Accelerator("B200", 179, 2_250, 8_000, 900),
        Accelerator("TPU-v4", 32, 275, 1_228, 300),
        Accelerator("TPU-v5e", 16, 197, 819, 200, also=("v5 lite", "v5litepod")),
        Accelerator("TPU-v5p", 95, 459, 2_765, 600, also=("v5",)),
        Accelerator("TPU-v6e", 32, 918, 1_640, 450, also=("v6 lite", "Trillium")),
    )
}
# Words that may stand in a name, also without a space, and distinguish nothing. A word that is not here and not in the
# name, such as "Laptop" or "MIG", is another device.
_COMMON = re.compile(r"NVIDIA|GEFORCE|RTX|TPU|GENERATION|SXM\d?|HBM\d\w?|(?<=\d)(?=ADA)")
_SIZE = re.compile(r"(\d+)GB")
# Drivers report less memory than the name says: ECC and the firmware take up to this share of it.
_RESERVED = 0.1


def accelerator(name: str) -> Accelerator:
    """By name, in any usual spelling: "rtx 4090", "RTX4090", "a100-80gb", "H100 SXM", "v5e"."""
    found = _by_name(name)
    if found is None:
        longer = [known for known in ACCELERATORS if _words(name) and _words(name) < _words(known)]
        meant = f"; did you mean {' or '.join(longer)}?" if longer else hint(name.upper(), ACCELERATORS)
        raise ConfigError(f"unknown accelerator {name!r}{meant}\nknown: {', '.join(ACCELERATORS)}")
    return found


def find_accelerator() -> Accelerator | None:
    """The accelerator of this process by JAX's name for it; None on a CPU, or if its numbers are unknown."""
    return _by_name(device_kind())


def device_kind() -> str:
    """What JAX calls the devices of this process, whether or not their numbers are known."""
    return jax.devices()[0].device_kind


def is_on_cpu() -> bool:
    """Whether this process has no accelerator, known or unknown."""
    return jax.default_backend() == "cpu"


def _by_name(name: str) -> Accelerator | None:
    """The accelerator that has the most words in common; None if a word is missing or belongs to another device."""
    words = _words(name)
    fitting = [
        (len(expected), known)
        for known in ACCELERATORS.values()
        for expected in map(_words, (known.name, *known.also))
        if expected <= words and all(_is_optional(word, known) for word in words - expected)
    ]
    return max(fitting, key=lambda fit: fit[0], default=(0, None))[1]


def _is_optional(word: str, known: Accelerator) -> bool:
    """Whether a word may follow the name of a known accelerator: its bus, or its own size of memory."""
    size = _SIZE.fullmatch(word)
    if size is None:
        return word == "PCIE"
    return (1 - _RESERVED) * int(size.group(1)) <= known.memory_gib <= int(size.group(1))


def _words(name: str) -> set[str]:
    """The words that distinguish an accelerator; sizes are written 80GB."""
    words = re.split(r"[^A-Z0-9]+", _COMMON.sub(" ", name.upper()))
    return {f"{word}GB" if re.fullmatch(r"\d{2,3}", word) else word for word in words} - {"", "GB"}


def claim_device_memory() -> None:
    """Makes XLA take the share of a GPU that the plan counts on. Call this before JAX is first used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))


def find_device_memory() -> float:
    """Memory of a device of this process in GiB, as a plan wants it: a run may use the share `MEMORY_FRACTION`."""
    return usable_device_bytes() / MEMORY_FRACTION / 2**30


def usable_device_bytes() -> int:
    """Memory that a run may use on one device. CPU devices share the memory of the machine."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * MEMORY_FRACTION) // jax.local_device_count()
