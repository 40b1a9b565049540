"""`acrlpd doctor`: is this machine and installation fit to train?"""

import contextlib
import ctypes.util
import dataclasses
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from rich.text import Text

from acrlpd.agents import train_step
from acrlpd.config import get_config
from acrlpd.config.command_line import Flag
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.accelerators import claim_device_memory, usable_device_bytes
from acrlpd.console import Console
from acrlpd.data.pipeline.tokenizer import default_tokenizer_path, download_command
from acrlpd.envs.simulators import SYSTEM_PACKAGES
from acrlpd.installation import OPTIONAL_PACKAGES, install_command
from acrlpd.process import compile_fast
from acrlpd.text import parse_arguments, print
from acrlpd.units import format_bytes

PACKAGES = ("acrlpd", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "av", "h5py", "tyro")
_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found."""

    status: Literal["ok", "warning", "failed"]
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Check versions, devices, memory and rendering, in seconds."""

    # Also make two updates of a tiny policy, which takes half a minute of compiling.
    train: Flag = False
    # Print JSON.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    """Runs all checks; the exit code is 1 if a check failed."""
    options = parse_arguments(DoctorOptions, args=args, prog="acrlpd doctor")
    claim_device_memory()  # The memory that is reported is the memory that a run may use.
    chosen = CHECKS | SLOW_CHECKS if options.train else CHECKS
    checks = {name: _run(check) for name, check in chosen.items()}
    healthy = all(check.status != "failed" for check in checks.values())
    if options.json:
        report = [{"name": name, **dataclasses.asdict(check)} for name, check in checks.items()]
        print(json.dumps({"healthy": healthy, "checks": report}, indent=2))
    else:
        width = max(map(len, checks))
        for name, check in checks.items():
            status = Text(f"{check.status:<7}", _STYLES[check.status])
            line = Text.assemble(f"{name:<{width}}  ", status, f"  {check.message}")
            Console().print(line, soft_wrap=True)  # a command in a message is whole, and can be copied
        ready = "ready to train" if options.train else "ready; --train also makes two updates of a tiny policy"
        Console().print(f"\n{ready}" if healthy else "\nnot ready: see what failed above", style="bold")
    return 0 if healthy else 1


def check_packages() -> Check:
    found = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    missing = [name for name in PACKAGES if found[name] is None]
    if missing:
        return Check(
            "failed", f"missing: {', '.join(missing)}; pip install {' '.join(missing)}, or install acrlpd again", found
        )
    summary = ", ".join(f"{name} {found[name]}" for name in ("python", "jax", "flax", "orbax-checkpoint", "numpy"))
    return Check("ok", summary, found)


def check_extras() -> Check:
    found: dict[str, Any] = {name: _version(name) for name in OPTIONAL_PACKAGES}
    absent = {name: extra for name, extra in OPTIONAL_PACKAGES.items() if found[name] is None}
    if not absent:
        return Check("ok", "all installed", found)
    extras = ", ".join(sorted(set(absent.values())))
    message = f"not installed: {', '.join(absent)}; {install_command('...')} with {extras}, if you need them"
    return Check("ok", message, found | {"absent": absent})


def check_devices() -> Check:
    usable, devices = usable_device_bytes(), jax.local_devices()
    found = [{"id": d.id, "platform": d.platform, "kind": d.device_kind, "usable_bytes": usable} for d in devices]
    kinds = ", ".join(sorted({d.device_kind for d in devices}))
    message = f"{len(devices)} x {kinds}, {format_bytes(usable)} usable each"
    ones = jnp.ones((256, 256), jnp.bfloat16)
    product = float((ones @ ones).astype(jnp.float32).sum())
    if product != 256**3:
        return Check("failed", f"{message}: a matrix product gave {product} instead of {256**3}", {"devices": found})
    if devices[0].platform == "cpu":
        return Check("warning", f"{message}: small models only; for GPUs {install_command('cuda')}", {"devices": found})
    return Check("ok", message, {"devices": found})


def check_rendering() -> Check:
    if ctypes.util.find_library("EGL") is not None:
        return Check("ok", "EGL found; use MUJOCO_GL=egl")
    message = f"no EGL: simulators work from state only (MUJOCO_GL=disabled); for cameras install {SYSTEM_PACKAGES}"
    return Check("warning", message)


def check_tokenizer() -> Check:
    """Only released weights need the tokenizer, so its absence is no fault of the machine."""
    path = default_tokenizer_path()
    if path.is_file():
        return Check("ok", f"PaliGemma's is at {path}")
    return Check("ok", f"PaliGemma's is not at {path}; if you train from released weights: {download_command(path)}")


def check_train_step() -> Check:
    """Makes two updates of a tiny agent with the loader, model, critics and optimizers of a run.

    The losses must be finite, and the critics must change.
    """
    from acrlpd.data.pipeline.loader import create_data_loader

    config = get_config("debug")
    start = time.perf_counter()
    with contextlib.closing(create_data_loader(config)) as loader:
        batches = [loader.sample_batch() for _ in range(2)]
    agent = jax.jit(lambda key: create_agent(config, key))(jax.random.key(0))
    step = train_step.lower(agent, batches[0], jax.random.key(0)).compile(compiler_options=compile_fast())
    before = float(optax.global_norm(agent.critics.online))
    losses: list[float] = []
    for batch in batches:
        agent, info = step(agent, batch, jax.random.key(len(losses)))
        losses.append(float(info["total_loss"]))
    seconds = time.perf_counter() - start
    details = {"losses": losses, "seconds": seconds}
    if not all(map(math.isfinite, losses)) or int(agent.skipped_updates):
        return Check("failed", f"losses {losses} are not finite", details)
    if before == float(optax.global_norm(agent.critics.online)):
        return Check("failed", "an update did not change the critics", details)
    return Check("ok", f"two updates of a tiny pi0 in {seconds:.1f} s, compile included", details)


CHECKS: dict[str, Callable[[], Check]] = {
    "packages": check_packages,
    "extras": check_extras,
    "devices": check_devices,
    "rendering": check_rendering,
    "tokenizer": check_tokenizer,
}
# Checks that compile a program, which takes longer than all others together.
SLOW_CHECKS: dict[str, Callable[[], Check]] = {"train step": check_train_step}


def _run(check: Callable[[], Check]) -> Check:
    """A check that raises has failed: a broken machine may show in any exception."""
    try:
        return check()
    except Exception as error:
        return Check("failed", f"{type(error).__name__}: {error}")


def _version(package: str) -> str | None:
    """The installed version; None: the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
