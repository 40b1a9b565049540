"""The memory of this machine's devices: what a run may use."""

import os

import jax

from acrlpd.config.plan.chips import MEMORY_FRACTION


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
