"""The seeds' original numbers for aloha, droid, libero and aloha_fold: large batches, many candidates, long runs.

Everything that is not said here is that of the preset without `_seeds`. Except for aloha_fold_seeds, the runs take
weeks on one GPU, and checkpoints every 5,000 updates take terabytes: `acrlpd plan` says how many, and `acrlpd train`
wants `--allow_long`.

The policy's learning rate in libero_seeds is twelve times the rate with which openpi fine-tunes these weights, so
validation warns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.presets import aloha, aloha_fold, droid, libero
from acrlpd.config.train_config import RLTrainConfig

_CHANGES: list[tuple[RLTrainConfig, Mapping[str, Any]]] = [
    (
        aloha.CONFIG,
        {
            "batch_size": 128,
            "data.augmentation_level": "light",
            "acrlpd.num_action_samples": 32,
            "actor_lr_schedule.warmup_steps": 2_000,
            "critic_lr_schedule.decay_steps": 25_000,
            "training.offline_steps": 500_000,
            "training.online_steps": 100_000,
            "training.save_frequency": 5_000,
            "training.gradient_accumulation_steps": 2,
        },
    ),
    (
        droid.CONFIG,
        {
            "batch_size": 64,
            "acrlpd.num_action_samples": 16,
            "actor_lr_schedule.warmup_steps": 5_000,
            "actor_lr_schedule.decay_steps": 100_000,
            "critic_lr_schedule.warmup_steps": 2_000,
            "critic_lr_schedule.decay_steps": 80_000,
            "training.offline_steps": 2_000_000,
            "training.online_steps": 200_000,
            "training.save_frequency": 5_000,
        },
    ),
    (
        libero.CONFIG,
        {
            "batch_size": 256,
            "data.augmentation_level": "strong",
            "acrlpd.num_action_samples": 64,
            "actor_lr_schedule.warmup_steps": 3_000,
            "actor_lr_schedule.peak_lr": 3e-4,
            "actor_lr_schedule.decay_steps": 50_000,
            "actor_lr_schedule.decay_lr": 3e-5,
            "critic_lr_schedule.warmup_steps": 1_500,
            "critic_lr_schedule.decay_steps": 40_000,
            "training.offline_steps": 1_000_000,
            "training.online_steps": 500_000,
            "training.save_frequency": 5_000,
        },
    ),
    (
        aloha_fold.CONFIG,
        {
            "batch_size": 32,
            "actor_lr_schedule.decay_steps": 50_000,
            "critic_lr_schedule.decay_steps": 50_000,
            "training.save_frequency": 1_000,
            "training.gradient_accumulation_steps": 2,
        },
    ),
]


def _with_seeds_numbers(base: RLTrainConfig, changes: Mapping[str, Any]) -> RLTrainConfig:
    config = apply_config_overrides(
        base, {**changes, "training.eval_frequency": 10_000, "checkpoints.keep_period": 5_000}
    )
    return dataclasses.replace(config, name=f"{base.name}_seeds")


CONFIGS = {f"The seeds' original numbers for {base.name}": _with_seeds_numbers(base, made) for base, made in _CHANGES}
