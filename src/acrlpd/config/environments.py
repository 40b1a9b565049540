"""The same preset for production, for development and for debugging."""

from collections.abc import Mapping
from typing import Any

from acrlpd.choice import hint
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.registry import get_config
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError

ENVIRONMENTS = ("production", "development", "debug")


def load_training_config(
    platform: str, environment: str = "production", custom_overrides: Mapping[str, Any] | None = None
) -> RLTrainConfig:
    """A preset as the environment wants it, with the caller's overrides on top.

    development: a quarter of the offline and half of the online steps, frequent evaluation and saving.
    debug: 1,000 + 500 steps of 8 windows with 4 candidates, metrics every 10, or less where the preset has less;
    of more windows where 8 do not split into micro-batches and devices.
    """
    config = get_config(platform)
    changes: dict[str, Any] = {}
    if environment == "development":
        changes = {
            "training.offline_steps": config.training.offline_steps // 4,
            "training.online_steps": config.training.online_steps // 2,
            "training.eval_frequency": 1_000,
            "training.save_frequency": 2_000,
        }
    elif environment == "debug":
        smallest = config.training.gradient_accumulation_steps * config.fsdp.fsdp_devices
        changes = {
            "training.offline_steps": min(1_000, config.training.offline_steps),
            "training.online_steps": min(500, config.training.online_steps),
            "batch_size": min(-(-8 // smallest) * smallest, config.batch_size),
            "acrlpd.num_action_samples": min(4, config.acrlpd.num_action_samples),
            "training.log_frequency": min(10, config.training.log_frequency),
        }
    elif environment != "production":
        raise ConfigError(
            f"unknown environment {environment!r}{hint(environment, ENVIRONMENTS)}; known: {', '.join(ENVIRONMENTS)}"
        )
    return apply_config_overrides(apply_config_overrides(config, changes), custom_overrides)
