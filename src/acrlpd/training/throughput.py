"""What the plan predicts for the devices of this run, and model FLOPs utilisation."""

import re

import jax

from acrlpd.config import RLTrainConfig
from acrlpd.config.plan.chips import CHIPS, Chip
from acrlpd.config.plan.flops import step_flops
from acrlpd.config.plan.memory import estimate_memory
from acrlpd.config.plan.plan import predict_step_seconds

# JAX's names of TPUs -> ours.
_TPU_KINDS = {"TPU v5 lite": "TPU-v5e", "TPU v5": "TPU-v5p", "TPU v6 lite": "TPU-v6e"}


def find_device_chip(device_kind: str) -> Chip | None:
    """The chip behind JAX's name for a device, for example 'NVIDIA H200'; None if the chip is unknown."""
    if device_kind in _TPU_KINDS:
        return CHIPS[_TPU_KINDS[device_kind]]
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    fitting = [chip for chip in CHIPS.values() if set(chip.name.upper().split("-")) <= words]
    return max(fitting, key=lambda chip: len(chip.name), default=None)


def planned_costs(rl_config: RLTrainConfig) -> dict[str, float | None]:
    """What the plan predicts for an update on these devices, to compare with what is measured."""
    chip = find_device_chip(jax.devices()[0].device_kind)
    devices, memory = jax.device_count(), estimate_memory(rl_config, jax.device_count())
    step_s = None if chip is None else predict_step_seconds(rl_config, memory, step_flops(rl_config), chip, devices)
    return {"peak_bytes": memory.peak, "step_s": step_s}


def update_flops(rl_config: RLTrainConfig) -> float:
    """FLOPs of one update over the whole batch; what is computed twice to save memory counts once."""
    flops = step_flops(rl_config)
    return (flops.total - flops.recompute) * rl_config.batch_size


def model_flops_utilization(rl_config: RLTrainConfig, steps_per_s: float) -> float | None:
    """Share of the peak of all devices that the arithmetic of an update uses; None if the peak is unknown (CPUs)."""
    chip = find_device_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return update_flops(rl_config) * steps_per_s / (chip.bf16_tflops * 1e12 * jax.device_count())
