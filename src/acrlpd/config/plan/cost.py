"""What a run costs: the time of an update, and the disk that checkpoints and replay take."""

import dataclasses
import math

from acrlpd.config.plan.accelerators import Accelerator
from acrlpd.config.plan.flops import StepFlops
from acrlpd.config.plan.memory import Memory, checkpoint_bytes
from acrlpd.config.train_config import RLTrainConfig

# Fitted to seven updates that were measured on one H200 (benchmarks/plan_against_xla-2026-11-15.md). The five of
# full-size policies agree within 1 %, the two of small ones within a third. No other accelerator was measured.
# Share of peak in the large matrix products of prefix and backward pass, recomputation counted.
DENSE_EFFICIENCY = 0.57
# Share of peak in the thin products of denoising candidates.
CANDIDATE_EFFICIENCY = 0.37
# What a product takes however small it is, together with the small kernels around it.
SECONDS_PER_PRODUCT = 8.5e-6

# Size of a JPEG of the replay relative to the raw image.
_JPEG_RATIO = 0.15


def predict_step_seconds(
    config: RLTrainConfig, memory: Memory, flops: StepFlops, accelerator: Accelerator, num_devices: int
) -> float:
    """The slower of arithmetic (at the measured share of peak) and communication, then the optimizer."""
    samples = config.batch_size / num_devices
    peak = accelerator.bf16_tflops * 1e12
    arithmetic = samples * (flops.dense + flops.critics) / (peak * DENSE_EFFICIENCY)
    arithmetic += samples * flops.candidates / (peak * CANDIDATE_EFFICIENCY)
    arithmetic += flops.num_products * SECONDS_PER_PRODUCT
    communication = 0.0
    if num_devices > 1:
        # Gradients are summed over all devices; sharded weights are gathered for the forward and the backward pass.
        shards = config.fsdp.fsdp_devices
        passes = (2 if shards == 1 else 3) * config.training.gradient_accumulation_steps
        whole = memory.gradients * shards
        communication = passes * whole * (num_devices - 1) / num_devices / (accelerator.interconnect_gbs * 1e9)
    # Parameters, gradients, two moments and the average: read and written once.
    optimizer = (2 * memory.state + memory.gradients) / (accelerator.bandwidth_gbs * 1e9)
    return max(arithmetic, communication) + optimizer


@dataclasses.dataclass(frozen=True)
class Disk:
    """Bytes that a run has on disk when it has the most."""

    checkpoint: int  # one of them
    num_checkpoints: int
    replay: int

    @property
    def total(self) -> int:
        return self.num_checkpoints * self.checkpoint + self.replay


def estimate_disk(config: RLTrainConfig) -> Disk:
    """Checkpoints and replay of a run without its baselines, each of which is a run of its own."""
    return Disk(checkpoint_bytes(config), _num_checkpoints(config), _replay_bytes(config))


def _num_checkpoints(config: RLTrainConfig) -> int:
    """Checkpoints that stay, the best by evaluation among them, and one that is being written."""
    keep, frequency, last = config.checkpoints, config.training.save_frequency, config.num_train_steps
    ends = {step for step in (config.training.offline_steps, last) if step % frequency}  # of phases, between two saves
    newest = sorted({*ends, *range(last - last % frequency, 0, -frequency)[: keep.max_to_keep]})[-keep.max_to_keep :]
    for_good = 0
    if keep.keep_period is not None:
        newest = [step for step in newest if step % keep.keep_period]
        for_good = last // math.lcm(frequency, keep.keep_period)
        for_good += sum(step % keep.keep_period == 0 for step in ends)
    best = (config.env.id is not None or config.data.validation_share > 0) and keep.keep_best
    num_saved = last // frequency + len(ends)
    return min(len(newest) + for_good + 1, num_saved) + best


def _replay_bytes(config: RLTrainConfig) -> int:
    """Frames as JPEG, states and actions as they are."""
    training, online = config.training, config.online
    if not training.online_steps:
        return 0
    env_steps = online.start_steps + math.ceil(training.online_steps / online.update_to_data_ratio)
    frames = len(config.data.repack.cameras) * math.prod(config.env.image_size) * 3 * _JPEG_RATIO
    return math.ceil(env_steps * (frames + 4 * (config.model.state_dim + config.qchunking.action_dim)))
