"""Presets by name, and the stages in which a preset is used: production, development and debug.

A preset is a file in `acrlpd.config.presets`; its docstring says what the preset is for.
"""

import functools
import importlib
import pkgutil
import types
from collections.abc import Mapping
from typing import Any

from acrlpd.choice import hint
from acrlpd.config import presets
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError

STAGES = ("production", "development", "debug")


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    """The module of every preset, by name and then by alias."""
    names = sorted(info.name for info in pkgutil.iter_modules(presets.__path__))
    modules = {name: importlib.import_module(f"{presets.__name__}.{name}") for name in names}
    return modules | {alias: module for module in modules.values() for alias in getattr(module, "ALIASES", ())}


def _module(name: str) -> types.ModuleType:
    if name not in _modules():
        raise ConfigError(f"unknown config {name!r}{hint(name, _modules())}\nknown configs: {', '.join(_modules())}")
    return _modules()[name]


def get_config(name: str) -> RLTrainConfig:
    """The preset of this name or alias."""
    return _module(name).CONFIG


def describe_config(name: str) -> str:
    """The preset's whole docstring."""
    return (_module(name).__doc__ or "").strip()


def list_configs() -> dict[str, str]:
    """Name -> one line about the preset, for every preset and alias."""
    presets_of = {name: module.__name__.rpartition(".")[2] for name, module in _modules().items()}
    return {
        name: describe_config(name).partition("\n")[0] if name == preset else f"the same as {preset}"
        for name, preset in presets_of.items()
    }


def load_training_config(
    platform: str, environment: str = "production", custom_overrides: Mapping[str, Any] | None = None
) -> RLTrainConfig:
    """The preset `platform` as the stage `environment` wants it, with the caller's overrides on top.

    development: a quarter of the offline and half of the online steps, frequent evaluation and saving.
    debug: 1,000 + 500 steps of 8 windows with 4 candidates and metrics every 10 steps, or less where the preset has
    less. There are more than 8 windows where 8 do not split into the preset's micro-batches and devices.
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
        raise ConfigError(f"unknown environment {environment!r}{hint(environment, STAGES)}; known: {', '.join(STAGES)}")
    return apply_config_overrides(apply_config_overrides(config, changes), custom_overrides)
