"""What a run is: frozen dataclasses, presets, YAML and dotted overrides, validation, and the plan.

Nothing here imports JAX at import time, so that the command line starts at once.
"""

from collections.abc import Sequence

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import (
    ACRLPDHyperparams,
    BestOfNConfig,
    LossWeights,
    QChunkingConfig,
)
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.base import LRSchedule
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.agents.schedules.rsqrt import RsqrtDecaySchedule
from acrlpd.config.data import DataConfig, DemonstrationsConfig, RepackConfig, RewardConfig
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.registry import get_config, list_configs, load_training_config
from acrlpd.config.run import (
    CheckpointConfig,
    EnvConfig,
    EvaluationConfig,
    FSDPConfig,
    LoggingConfig,
    OnlineConfig,
    OpenPICompatibilityConfig,
    TrainingConfig,
    WeightLoaderConfig,
)
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError, config_hash, diff_configs, to_dict
from acrlpd.config.validation import Validation, validate_config
from acrlpd.config.yaml_files import config_to_yaml, load_config, save_config

__all__ = [
    "ACRLPDHyperparams",
    "AdamW",
    "BestOfNConfig",
    "CheckpointConfig",
    "ConfigError",
    "ConstantSchedule",
    "CosineDecaySchedule",
    "DataConfig",
    "DemonstrationsConfig",
    "EnvConfig",
    "EvaluationConfig",
    "FSDPConfig",
    "LRSchedule",
    "LoggingConfig",
    "LossWeights",
    "MLPCritics",
    "OnlineConfig",
    "OpenPICompatibilityConfig",
    "QChunkingConfig",
    "RLTrainConfig",
    "RepackConfig",
    "RewardConfig",
    "RsqrtDecaySchedule",
    "TrainingConfig",
    "Validation",
    "WeightLoaderConfig",
    "apply_config_overrides",
    "cli",
    "config_hash",
    "config_to_yaml",
    "diff_configs",
    "get_config",
    "list_configs",
    "load_config",
    "load_training_config",
    "save_config",
    "to_dict",
    "validate_config",
]


def cli(args: Sequence[str] | None = None) -> RLTrainConfig:
    """The config that the command line asks for: `--config NAME` and any overrides."""
    # Imported here: only a command line needs a command-line parser.
    from acrlpd.config.command_line import NoOptions, parse_config_args

    return parse_config_args(NoOptions, args, description="Choose and change a config.")[0]
