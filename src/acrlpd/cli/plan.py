"""`acrlpd plan`: what a config needs, before it runs, as a table for people and as JSON for programs."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from acrlpd.config.command_line import Flag, parse_config_args
from acrlpd.config.plan.plan import GIB, Plan, make_plan
from acrlpd.config.tree import ConfigError
from acrlpd.config.validation import validate_config
from acrlpd.console import Console
from acrlpd.text import print
from acrlpd.units import format_bytes

_NOTES = {
    "parameters": "trainable float32, frozen bfloat16",
    "gradients": "of trainable parameters, while an update runs",
    "optimizer": "of the policy, for example Adam's two moments",
    "ema": "moving average of the policy",
    "critics": "online, target, moments, gradients",
    "activations": "kept for the backward pass, and its largest layer",
    "candidates": "contexts and best-of-N; freed before gradients and activations are there",
    "batch": "images, states, actions and noise",
}


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Memory, FLOPs and step time of a config on named accelerators; nothing is compiled."""

    # Number of accelerators; default: as many as the config's fsdp_devices.
    devices: int | None = None
    # Name of the accelerator; an unknown name lists the known ones.
    accelerator: str = "H100"
    # Memory of one accelerator in GiB; default: the memory of the named accelerator.
    device_memory: float | None = None
    # Print JSON.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    """Prints the plan. The command succeeds even if the config does not fit."""
    config, options = parse_config_args(PlanOptions, args, prog="acrlpd plan")
    if options.device_memory is not None and not 0 < options.device_memory < math.inf:
        raise ConfigError(f"--device-memory must be above 0 GiB; found {options.device_memory}")
    num_devices = config.fsdp.fsdp_devices if options.devices is None else options.devices
    validate_config(config, num_devices=num_devices).raise_for_errors()
    plan = make_plan(
        config, num_devices=num_devices, device_memory_gib=options.device_memory, accelerator=options.accelerator
    )
    if options.json:
        print(json.dumps(plan_to_dict(plan), indent=2))
    else:
        print_plan(plan)
    return 0


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Everything in the plan, with derived numbers; bytes are per device, FLOPs per sample."""
    return {
        "config": plan.config.name,
        "devices": plan.num_devices,
        "accelerator": plan.accelerator and plan.accelerator.name,
        "device_memory_bytes": int(plan.device_memory_gib * GIB),
        "usable_bytes": int(plan.usable_bytes),
        "bytes_per_device": {**dataclasses.asdict(plan.memory), "state": plan.memory.state, "peak": plan.memory.peak},
        "flops_per_sample": {**dataclasses.asdict(plan.flops), "train": plan.flops.train, "total": plan.flops.total},
        "batch_size": plan.config.batch_size,
        "step_seconds": plan.step_seconds,
        "samples_per_second": plan.samples_per_second,
        "fits": plan.fits,
        "suggestion": plan.suggestion,
        "verdict": plan.verdict,
    }


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Memory, arithmetic, time and the verdict.

    Without a known accelerator, as in training on a CPU, arithmetic predicts no time. The plan then leaves it out,
    because counting takes as long as tracing the update once more.
    """
    work: list[Table | str] = [] if plan.accelerator is None else [_work_table(plan), ""]
    (console or Console()).print(Group(_memory_table(plan), "", *work, plan.verdict), highlight=False)


def _table(heading: str, title: str | None = None) -> Table:
    """A table with a name, a number and a note in each row."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column(heading)
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("per device", title=f"{plan.config.name} on {plan.devices}")
    for name, size in dataclasses.asdict(plan.memory).items():
        table.add_row(name, format_bytes(size), _NOTES[name])
    table.add_row("peak", format_bytes(plan.memory.peak), f"of {format_bytes(plan.usable_bytes)}", style="bold")
    return table


def _work_table(plan: Plan) -> Table:
    flops, table = plan.flops, _table("per sample")
    training = f"training the policy alone would be {_format_flops(flops.train)}"
    table.add_row("policy forward", _format_flops(flops.forward), training)
    table.add_row("one candidate", _format_flops(flops.candidate), "for one observation")
    parts = {
        "differentiated": flops.backward,
        "recomputed": flops.recompute,
        "without gradient": flops.no_gradient,
        "candidates": flops.candidates,
        "critics": flops.critics,
    }
    shares = ", ".join(f"{name} {value / flops.total:.0%}" for name, value in parts.items() if value)
    table.add_row("update", _format_flops(flops.total), shares)
    if plan.step_seconds is not None:
        rate = f"{plan.samples_per_second:,.1f} samples/s at batch {plan.config.batch_size}, predicted"
        table.add_row("step", f"{plan.step_seconds * 1e3:,.0f} ms", rate, style="bold")
    return table


def _format_flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP" if value >= 1e11 else f"{value / 1e9:.3g} GFLOP"
