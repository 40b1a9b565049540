"""What a run is: frozen dataclasses, presets, YAML files and overrides by dotted name, validation, and the plan.

Here is what a program needs that makes and changes configs. Other kinds of sections, such as `Pi0Config` or `AdamW`,
are imported from the module that holds the kind.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, BestOfNConfig, LossWeights, QChunkingConfig
from acrlpd.config.command_line import cli
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
from acrlpd.config.validation import validate_config
from acrlpd.config.yaml_files import config_to_yaml, load_config, save_config
