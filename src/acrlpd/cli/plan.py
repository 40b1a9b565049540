"""`acrlpd plan`: what a config needs, before it runs, as a table for people and as JSON for programs."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Group
from rich.table import Table

from acrlpd.config.command_line import Flag, parse_config_args
from acrlpd.config.plan.accelerators import ACCELERATORS, claim_device_memory, find_accelerator
from acrlpd.config.plan.plan import GIB, Plan, make_plan, plan_here
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError
from acrlpd.config.validation import validate_config
from acrlpd.console import Console
from acrlpd.text import print
from acrlpd.units import format_bytes, format_duration, format_seconds

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
    """Memory, time and disk of a config, on this machine or on the accelerators that you name; nothing is compiled."""

    # Name of the accelerator; an unknown name lists the known ones. Default: the accelerator of this machine.
    accelerator: str | None = None
    # Memory of one accelerator in GiB; default: that of the named accelerator. Without a name no time is predicted.
    device_memory: float | None = None
    # Number of accelerators; default: those of this machine, or for other accelerators the config's fsdp_devices.
    devices: int | None = None
    # Print JSON.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    """Prints the plan. The command succeeds even if the config does not fit."""
    config, options = parse_config_args(PlanOptions, args, prog="acrlpd plan")
    if options.device_memory is not None and not 0 < options.device_memory < math.inf:
        raise ConfigError(f"--device-memory must be above 0 GiB; found {options.device_memory}")
    here = options.accelerator is None and options.device_memory is None
    plan = _plan_here(config, options.devices) if here else _plan_elsewhere(config, options)
    if options.json:
        print(json.dumps(plan_to_dict(plan), indent=2))
        return 0
    print_plan(plan)
    print(f"\n{plan.verdict}")
    if not plan.fits:
        print("`acrlpd train` refuses a run that does not fit, unless --ignore_plan")
    if plan.is_too_long:
        print("`acrlpd train` refuses a run of more than a week, unless --allow_long")
    if plan.accelerator is None:
        unknown = f"this machine has no accelerator that the plan knows ({plan.devices})"
        why = unknown if here else "--device-memory names no accelerator"
        print(f"\nno time, because {why}; --accelerator NAME gives one: {', '.join(ACCELERATORS)}")
    return 0


def _plan_here(config: RLTrainConfig, num_devices: int | None) -> Plan:
    """The plan for the accelerators of this machine, or for its memory."""
    claim_device_memory()
    if num_devices is None:
        num_devices = config.fsdp.fsdp_devices if find_accelerator() is None else jax.device_count()
    validate_config(config, num_devices=num_devices).raise_for_errors()
    return plan_here(config, num_devices)


def _plan_elsewhere(config: RLTrainConfig, options: PlanOptions) -> Plan:
    """The plan for the accelerators that the options describe."""
    num_devices = config.fsdp.fsdp_devices if options.devices is None else options.devices
    validate_config(config, num_devices=num_devices).raise_for_errors()
    return make_plan(
        config, num_devices=num_devices, device_memory_gib=options.device_memory, accelerator=options.accelerator
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Everything in the plan, with derived numbers; bytes in memory are per device, FLOPs per sample."""
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
        "run_seconds": plan.run_seconds,
        "disk_bytes": {**dataclasses.asdict(plan.disk), "total": plan.disk.total},
        "fits": plan.fits,
        "suggestion": plan.suggestion,
        "verdict": plan.verdict,
    }


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Memory, arithmetic, time and disk.

    Without a known accelerator, as in training on a CPU, arithmetic predicts no time. The plan then leaves it out,
    because counting takes as long as tracing the update once more.
    """
    work: list[Table | str] = [] if plan.accelerator is None else [_work_table(plan), ""]
    parts = Group(_memory_table(plan), "", *work, _run_table(plan))
    (console or Console()).print(parts, highlight=False)


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
        table.add_row("step", format_seconds(plan.step_seconds), rate, style="bold")
    return table


def _run_table(plan: Plan) -> Table:
    """What the whole run takes: hours and disk."""
    training, disk, table = plan.config.training, plan.disk, _table("whole run")
    phases = {"offline": training.offline_steps, "online": training.online_steps}
    updates = " + ".join(f"{steps:,} {phase}" for phase, steps in phases.items() if steps)
    table.add_row("updates", f"{plan.config.num_train_steps:,}", updates)
    if plan.run_seconds is not None:
        extra = "predicted" if plan.config.env.id is None else "predicted; playing and evaluations come on top"
        table.add_row("time", format_duration(plan.run_seconds), extra, style="bold")
    kept = f"{disk.num_checkpoints} checkpoints of {format_bytes(disk.checkpoint)}, the one being written included"
    replay = f"; replay {format_bytes(disk.replay)}" if disk.replay else ""
    table.add_row("disk", format_bytes(disk.total), kept + replay, style="bold")
    if baselines := plan.config.evaluation.baselines:
        table.add_row("", "", f"{len(baselines)} baselines ({', '.join(baselines)}) come on top")
    return table


def _format_flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP" if value >= 1e11 else f"{value / 1e9:.3g} GFLOP"
