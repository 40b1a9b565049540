"""Whether a config fits, how long it takes, what it leaves on disk, and the smallest change that makes it fit."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.plan import accelerators
from acrlpd.config.plan.accelerators import MEMORY_FRACTION, Accelerator
from acrlpd.config.plan.cost import Disk, estimate_disk, predict_step_seconds
from acrlpd.config.plan.flops import StepFlops, step_flops
from acrlpd.config.plan.memory import Memory, estimate_memory
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.units import format_bytes, format_duration, format_seconds

GIB = 2**30
# A run that takes longer by the plan is refused, unless it is allowed: most often its length is a mistake.
LONGEST_RUN_S = 7 * 24 * 3600.0
# What to say where a run does not fit into the memory of a CPU: most often the policy is one for a GPU.
NO_ACCELERATOR = (
    "JAX finds no GPU or TPU here, and a CPU is for small policies. If this machine has a GPU, `acrlpd doctor` says "
    "what is missing; `acrlpd plan --accelerator NAME` plans the run for another machine; `acrlpd configs new DATASET "
    "--accelerator cpu` writes a config with a policy for a CPU"
)
# What to say of a GPU or TPU whose numbers are unknown: a run that never ends is not refused there.
NO_TIME = (
    "The plan does not know this accelerator, so it predicts no time, and no run is too long for it; "
    "`acrlpd plan --accelerator NAME` says the time on one that it knows"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs, before its update is compiled."""

    config: RLTrainConfig
    num_devices: int
    accelerator: Accelerator | None  # None: an unknown accelerator, for which no time is predicted
    device_memory_gib: float
    memory: Memory
    on_cpu: bool
    # What JAX calls devices that are unknown; None where it was not asked.
    device_kind: str | None
    # Changes, by dotted name, with which the update fits; empty if the update fits as it is, None if no change helps.
    suggestion: dict[str, Any] | None

    @property
    def usable_bytes(self) -> float:
        return self.device_memory_gib * GIB * MEMORY_FRACTION

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable_bytes

    @property
    def flops(self) -> StepFlops:
        """Counted when they are asked for, which takes seconds."""
        return step_flops(self.config)

    @property
    def step_seconds(self) -> float | None:
        """The predicted time of an update; None for an unknown accelerator."""
        if self.accelerator is None:
            return None
        return predict_step_seconds(self.config, self.memory, self.flops, self.accelerator, self.num_devices)

    @property
    def samples_per_second(self) -> float | None:
        return None if self.step_seconds is None else self.config.batch_size / self.step_seconds

    @property
    def run_seconds(self) -> float | None:
        """The predicted time of all updates of both phases; playing and evaluations come on top."""
        return None if self.step_seconds is None else self.config.num_train_steps * self.step_seconds

    @property
    def is_too_long(self) -> bool:
        return self.run_seconds is not None and self.run_seconds > LONGEST_RUN_S

    @property
    def disk(self) -> Disk:
        return estimate_disk(self.config)

    @property
    def devices(self) -> str:
        """The devices in words."""
        if self.accelerator is not None:
            return f"{self.num_devices} x {self.accelerator.name}"
        if self.on_cpu:
            return f"{self.num_devices} x CPU"
        if self.device_kind is not None:
            return f"{self.num_devices} x {self.device_kind}"
        return f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"

    @property
    def summary(self) -> str:
        """The plan in one line."""
        parts = [f"{format_bytes(self.memory.peak)} of {format_bytes(self.usable_bytes)} per device"]
        if self.step_seconds is not None and self.run_seconds is not None:
            parts.append(f"{format_seconds(self.step_seconds)} an update")
            parts.append(f"{format_duration(self.run_seconds)} for {self.config.num_train_steps:,} updates")
        parts.append(f"{format_bytes(self.disk.total)} of disk")
        summary = f"{self.config.name} on {self.devices}: {', '.join(parts)}"
        return summary if self.accelerator is not None or self.on_cpu else f"{summary}. {NO_TIME}"

    @property
    def verdict(self) -> str:
        """One or two sentences."""
        needed = f"{format_bytes(self.memory.peak)} per device of {format_bytes(self.usable_bytes)} usable"
        if self.fits:
            return f"fits: {needed}"
        if self.suggestion is None:
            text = f"does not fit: {needed}, and no change of layout helps; use more or larger devices"
        else:
            text = f"does not fit: {needed}. Smallest change that does: {as_flags(self.suggestion)}"
        return f"{text}\n{NO_ACCELERATOR}" if self.on_cpu else text


def make_plan(
    config: RLTrainConfig,
    *,
    num_devices: int = 1,
    device_memory_gib: float | None = None,
    accelerator: str | None = None,
    on_cpu: bool = False,
    device_kind: str | None = None,
) -> Plan:
    """Plans a run of `config` on `num_devices` accelerators, or on a CPU.

    The memory is that of the named accelerator unless it is given; without a name no time is predicted, and
    `device_kind` is what JAX calls the devices.
    """
    named = None if accelerator is None else accelerators.accelerator(accelerator)
    if device_memory_gib is None:
        if named is None:
            raise ValueError("without an accelerator's name the plan needs device_memory_gib")
        device_memory_gib = named.memory_gib
    plan = Plan(
        config=config,
        num_devices=num_devices,
        accelerator=named,
        device_memory_gib=device_memory_gib,
        memory=estimate_memory(config, num_devices, on_cpu=on_cpu),
        on_cpu=on_cpu,
        device_kind=device_kind,
        suggestion={},
    )
    if plan.fits:
        return plan
    suggestion = smallest_change(config, num_devices, plan.usable_bytes, on_cpu=on_cpu)
    return dataclasses.replace(plan, suggestion=suggestion)


def plan_here(config: RLTrainConfig, num_devices: int, *, num_runs: int = 1) -> Plan:
    """Plans a run of `config` on devices like those of this process, whose memory `num_runs` runs share."""
    found, memory_gib = accelerators.find_accelerator(), accelerators.find_device_memory() / num_runs
    name = None if found is None else found.name
    return make_plan(
        config,
        num_devices=num_devices,
        device_memory_gib=memory_gib,
        accelerator=name,
        on_cpu=accelerators.is_on_cpu(),
        device_kind=accelerators.device_kind(),
    )


def smallest_change(
    config: RLTrainConfig, num_devices: int, usable_bytes: float, *, on_cpu: bool = False
) -> dict[str, Any] | None:
    """The first change, from harmless to drastic, with which the peak fits. Every setting in it is needed."""

    def fits(changes: dict[str, Any]) -> bool:
        changed = apply_config_overrides(config, changes)
        return estimate_memory(changed, num_devices, on_cpu=on_cpu).peak <= usable_bytes

    for changes in _changes(config, num_devices):
        if fits(changes):
            for key in list(changes):
                fewer = {name: value for name, value in changes.items() if name != key}
                changes = fewer if fits(fewer) else changes
            return changes
    return None


def as_flags(changes: Mapping[str, Any]) -> str:
    """Changes of a config as the command line takes them."""
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items())


def larger_accumulations(config: RLTrainConfig, num_devices: int) -> Iterator[int]:
    """Larger numbers of micro-batches that leave whole samples on every device, the next one first."""
    samples, rest = divmod(config.batch_size, num_devices)
    if rest:
        return
    small = [n for n in range(1, math.isqrt(samples) + 1) if samples % n == 0]
    divisors = sorted({*small, *(samples // n for n in small)})
    yield from (steps for steps in divisors if steps > config.training.gradient_accumulation_steps)


def _changes(config: RLTrainConfig, num_devices: int) -> Iterator[dict[str, Any]]:
    """Single changes that keep the result, then their combinations, then changes that train fewer weights."""
    exact = list(_exact_changes(config, num_devices))
    yield from exact
    # All layouts at once: one candidate at a time, recompute, shard; then ever smaller micro-batches.
    together: dict[str, Any] = {}
    for changes in exact:
        if "training.gradient_accumulation_steps" not in changes:
            together |= changes
            if together != changes:
                yield dict(together)
    accumulations = [c for c in exact if "training.gradient_accumulation_steps" in c]
    yield from (together | changes for changes in accumulations)
    smallest = together | (accumulations[-1] if accumulations else {})
    for changes in map(dict, config.model.lighter_changes(freeze_pi0_backbone=config.freeze_pi0_backbone)):
        yield changes
        yield from (changes | accumulation for accumulation in accumulations)
        yield changes | smallest


def _exact_changes(config: RLTrainConfig, num_devices: int) -> Iterator[dict[str, Any]]:
    """Changes of layout alone: the updates stay the same up to rounding."""
    if config.acrlpd.best_of_n.strategy != "sequential" and config.acrlpd.num_action_samples > 1:
        yield {"acrlpd.best_of_n.strategy": "sequential"}
    yield from map(dict, config.model.layout_changes())
    for steps in larger_accumulations(config, num_devices):
        yield {"training.gradient_accumulation_steps": steps}
    for shards in range(config.fsdp.fsdp_devices + 1, num_devices + 1):
        if num_devices % shards == 0:
            yield {"fsdp.fsdp_devices": shards}
