"""`acrlpd doctor`: is this machine and installation fit to train?"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tyro

from acrlpd.cli import machine
from acrlpd.config.command_line import Flag

Status = Literal["ok", "warning", "failed"]
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """How to report."""

    # Print JSON.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    """Runs all checks; exit code 1 when one failed."""
    description = "Check versions, devices, memory, rendering, and a tiny train step."
    options = tyro.cli(DoctorOptions, args=list(args), prog="acrlpd doctor", description=description)
    machine.claim_device_memory()  # what is found usable is what a run may use
    checks = [_run(name, check) for name, check in CHECKS.items()]
    healthy = all(check.status != "failed" for check in checks)
    if options.json:
        report = {"healthy": healthy, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        _print(checks, healthy)
    return 0 if healthy else 1


def check_packages() -> Check:
    found = machine.versions()
    missing = [name for name in machine.PACKAGES if found[name] is None]
    if missing:
        return Check("packages", "failed", f"missing: {', '.join(missing)}; run `make install`", found)
    summary = ", ".join(f"{name} {found[name]}" for name in ("python", "jax", "flax", "orbax-checkpoint", "numpy"))
    return Check("packages", "ok", summary, found)


def check_extras() -> Check:
    found = machine.versions()
    absent = {name: extra for name, extra in machine.OPTIONAL_PACKAGES.items() if found[name] is None}
    if not absent:
        return Check("extras", "ok", "all installed")
    extras = ", ".join(sorted(set(absent.values())))
    message = f"not installed: {', '.join(absent)}; pip install 'acrlpd[...]' with {extras}, if you need them"
    return Check("extras", "ok", message, {"absent": absent})


def check_devices() -> Check:
    found = machine.devices()
    kinds = sorted({device["kind"] for device in found})
    gib = found[0]["usable_bytes"] / 2**30
    message = f"{len(found)} x {', '.join(kinds)}, {gib:.1f} GiB usable each"
    if found[0]["platform"] == "cpu":
        return Check("devices", "warning", f"{message}: small models only; GPUs need acrlpd[cuda]", {"devices": found})
    return Check("devices", "ok", message, {"devices": found})


def check_rendering() -> Check:
    if machine.has_egl():
        return Check("rendering", "ok", "EGL found; use MUJOCO_GL=egl")
    message = (
        "no EGL: simulators work from state only (MUJOCO_GL=disabled); for cameras install "
        "libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri"
    )
    return Check("rendering", "warning", message)


def check_train_step() -> Check:
    """Loader, model, critics and optimizers as in a run, tiny: two updates, finite and moving."""
    import jax

    from acrlpd.agents import train_step
    from acrlpd.config import get_config
    from acrlpd.config.create_agent import create_agent
    from acrlpd.data.pipeline.loader import create_data_loader

    config = get_config("debug")
    start = time.perf_counter()
    with contextlib.closing(create_data_loader(config)) as loader:
        batches = [loader.sample_batch() for _ in range(2)]
    agent = jax.jit(lambda key: create_agent(config, key))(jax.random.key(0))
    # Two small updates do not repay an optimised program.
    on_cpu = jax.default_backend() == "cpu"
    options: dict[str, str | bool] = {"xla_backend_optimization_level": "0"} if on_cpu else {}
    step = train_step.lower(agent, batches[0], jax.random.key(0)).compile(compiler_options=options)
    before = _sum_of_magnitudes(agent.critics.online)
    losses: list[float] = []
    for batch in batches:
        agent, info = step(agent, batch, jax.random.key(len(losses)))
        losses.append(float(info["total_loss"]))
    seconds = time.perf_counter() - start
    details = {"losses": losses, "seconds": seconds}
    if not all(map(math.isfinite, losses)) or int(agent.skipped_updates):
        return Check("train step", "failed", f"losses {losses} are not finite", details)
    if before == _sum_of_magnitudes(agent.critics.online):
        return Check("train step", "failed", "an update did not change the critics", details)
    return Check("train step", "ok", f"two updates of a tiny pi0 in {seconds:.1f} s, compile included", details)


def _sum_of_magnitudes(tree: Any) -> float:
    import jax

    return float(sum(abs(leaf).sum() for leaf in jax.tree.leaves(tree)))


CHECKS: dict[str, Callable[[], Check]] = {
    "packages": check_packages,
    "extras": check_extras,
    "devices": check_devices,
    "rendering": check_rendering,
    "train step": check_train_step,
}


def _run(name: str, check: Callable[[], Check]) -> Check:
    """A check that breaks is a finding: what is wrong with the machine may show in any exception."""
    try:
        return check()
    except Exception as error:
        return Check(name, "failed", f"{type(error).__name__}: {error}")


def _print(checks: Sequence[Check], healthy: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for check in checks:
        table.add_row(check.name, _MARKS[check.status], escape(check.message))
    console = Console()
    console.print(table)
    verdict = "ready to train" if healthy else "not ready: see what failed above"
    console.print(f"\n[bold]{verdict}[/]")
