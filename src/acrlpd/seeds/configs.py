"""The seeds' configs: their presets by function, and their flat training config."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config import RLTrainConfig, apply_config_overrides, get_config, validate_config

get_droid_config = get_droid_acrlpd_config = functools.partial(get_config, "droid_seeds")
get_aloha_config = get_aloha_acrlpd_config = functools.partial(get_config, "aloha_seeds")
get_libero_config = get_libero_acrlpd_config = functools.partial(get_config, "libero_seeds")

ACRLPD_V2_ALOHA_FOLD = get_config("aloha_fold_seeds")
ACRLPD_V2_DROID = get_config("droid_seeds")
ACRLPD_V2_LIBERO = get_config("libero_seeds")

# Fields of `ACRLPDTrainingConfig` that have another name in a config.
_FIELDS = {
    "keep_period": "checkpoints.keep_period",
    "project_name": "logging.project_name",
    "experiment_name": "exp_name",
    "max_grad_norm": "actor_optimizer.clip_gradient_norm",
}


@dataclasses.dataclass(frozen=True)
class ACRLPDTrainingConfig:
    """The settings of a training as the seeds list them; None: as in the config that they are applied to."""

    offline_steps: int | None = None
    online_steps: int | None = None
    eval_frequency: int | None = None
    log_frequency: int | None = None
    save_frequency: int | None = None
    checkpoint_dir: str | None = None
    keep_period: int | None = None
    gradient_accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    early_stopping_patience: int | None = None
    project_name: str | None = None
    experiment_name: str | None = None
    use_wandb: bool = False
    # Remove an earlier run of this name first.
    overwrite: bool = False
    # Go on from the newest checkpoint of the run of this name.
    resume: bool = False

    def apply(self, rl_config: RLTrainConfig) -> RLTrainConfig:
        """The config with these settings."""
        settings = {name: value for name, value in vars(self).items() if not isinstance(value, bool)}
        changes = {_FIELDS.get(name, name): value for name, value in settings.items() if value is not None}
        if self.max_grad_norm is not None:
            changes["critic_optimizer.clip_gradient_norm"] = self.max_grad_norm
        if self.use_wandb:
            changes["logging.wandb"] = "online"
        return apply_config_overrides(rl_config, changes)


def CriticConfig(**fields: Any) -> MLPCritics:  # noqa: N802 (the seeds' name)
    """The critics' architecture, whose `hidden_dims` may be a list."""
    if "hidden_dims" in fields:
        fields["hidden_dims"] = tuple(fields["hidden_dims"])
    return MLPCritics(**fields)


def create_cosine_schedule(peak_lr: float, decay_steps: int) -> CosineDecaySchedule:
    """A cosine that ends at a tenth of its peak."""
    return CosineDecaySchedule(peak_lr=peak_lr, decay_steps=decay_steps, decay_lr=peak_lr / 10)


def merge_configurations(base: RLTrainConfig, *overrides: Mapping[str, Any]) -> RLTrainConfig:
    """The config with several sets of changes; the last one wins."""
    return functools.reduce(apply_config_overrides, overrides, base)


def validate_config_compatibility(config: RLTrainConfig) -> list[str]:
    """The warnings about a config; errors are raised together, as one `ConfigError`."""
    found = validate_config(config)
    found.raise_for_errors()
    return list(found.warnings)
