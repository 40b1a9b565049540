"""Presets by name, and the stages in which a preset is used: production, development and debug.

A preset is a file in `acrlpd.config.presets`; its docstring says what the preset is for. A file may also hold several
presets that differ little: its `CONFIGS` has one line about each preset, and the preset.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from acrlpd.choice import hint
from acrlpd.config import presets
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError

STAGES = ("production", "development", "debug")


@dataclasses.dataclass(frozen=True)
class _Preset:
    config: RLTrainConfig
    summary: str
    description: str


@functools.cache
def _presets() -> dict[str, _Preset]:
    """Every preset by name, and then by alias."""
    found: dict[str, _Preset] = {}
    aliases: dict[str, _Preset] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(presets.__path__)):
        module = importlib.import_module(f"{presets.__name__}.{name}")
        text = (module.__doc__ or "").strip()
        several: Mapping[str, RLTrainConfig] = getattr(module, "CONFIGS", {})
        found |= {config.name: _Preset(config, line, f"{line}.\n\n{text}") for line, config in several.items()}
        if hasattr(module, "CONFIG"):
            found[name] = _Preset(module.CONFIG, text.partition("\n")[0], text)
            same = _Preset(module.CONFIG, f"the same as {name}", text)
            aliases |= dict.fromkeys(getattr(module, "ALIASES", ()), same)
    return found | aliases


def _preset(name: str) -> _Preset:
    if name not in _presets():
        raise ConfigError(f"unknown config {name!r}{hint(name, _presets())}\nknown configs: {', '.join(_presets())}")
    return _presets()[name]


def get_config(name: str) -> RLTrainConfig:
    """The preset of this name or alias."""
    return _preset(name).config


def describe_config(name: str) -> str:
    """All that is written about the preset."""
    return _preset(name).description


def list_configs() -> dict[str, str]:
    """Name -> one line about the preset, for every preset and alias."""
    return {name: preset.summary for name, preset in _presets().items()}


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
