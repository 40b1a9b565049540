"""What this machine has: devices and their memory, packages, rendering."""

import ctypes.util
import importlib.metadata
import os
import platform
from typing import Any

from acrlpd.config.plan.chips import MEMORY_FRACTION

PACKAGES = ("acrlpd", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "av", "h5py", "tyro")
OPTIONAL_PACKAGES = {
    "mujoco": "sim",
    "ogbench": "sim",
    "gym-aloha": "sim",
    "huggingface-hub": "hub",
    "gcsfs": "gcs",
    "wandb": "wandb",
    "tensorboardX": "tensorboard",
    "websockets": "serve",
}


def versions() -> dict[str, str | None]:
    """Installed version of every package we know of; None where it is absent."""
    names = (*PACKAGES, *OPTIONAL_PACKAGES)
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[dict[str, Any]]:
    """JAX's local devices."""
    import jax

    usable = usable_device_bytes()
    return [
        {"id": d.id, "platform": d.platform, "kind": d.device_kind, "usable_bytes": usable} for d in jax.local_devices()
    ]


def claim_device_memory() -> None:
    """Before JAX's first use: XLA takes three quarters of a GPU by default, the plan counts on another share."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))


def usable_device_bytes() -> int:
    """Memory that a run may use on one device; CPU devices share the machine's."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * MEMORY_FRACTION) // jax.local_device_count()


def has_egl() -> bool:
    """Whether MuJoCo can render without a display."""
    return ctypes.util.find_library("EGL") is not None
