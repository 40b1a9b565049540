"""Model FLOPs utilisation: how much of the devices' peak goes into the arithmetic the update needs."""

import re

import jax

from acrlpd.config import RLTrainConfig
from acrlpd.config.plan import CHIPS, Chip, step_flops

# TPUs call themselves other than people do.
_TPU_KINDS = {"TPU v5 lite": "TPU-v5e", "TPU v5": "TPU-v5p", "TPU v6 lite": "TPU-v6e"}


def find_device_chip(device_kind: str) -> Chip | None:
    """The chip behind JAX's name for a device, for example 'NVIDIA H200'; None if it is not a known one."""
    if device_kind in _TPU_KINDS:
        return CHIPS[_TPU_KINDS[device_kind]]
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    fitting = [chip for chip in CHIPS.values() if set(chip.name.upper().split("-")) <= words]
    return max(fitting, key=lambda chip: len(chip.name), default=None)


def update_flops(rl_config: RLTrainConfig) -> float:
    """Of one update over the whole batch; what is computed twice to save memory counts once."""
    flops = step_flops(rl_config)
    return (flops.total - flops.recompute) * rl_config.batch_size


def model_flops_utilization(rl_config: RLTrainConfig, steps_per_s: float) -> float | None:
    """Of all devices together; None where their peak is not known, as for CPUs."""
    chip = find_device_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return update_flops(rl_config) * steps_per_s / (chip.bf16_tflops * 1e12 * jax.device_count())
