"""Collects what is wrong with a config: bounds of fields, then each part by itself, then parts that must fit."""

import dataclasses

from acrlpd.config import checks
from acrlpd.config.bounds import check_bounds
from acrlpd.config.create_agent import check_agent
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError
from acrlpd.findings import Level


@dataclasses.dataclass(frozen=True)
class Validation:
    """What `validate_config` found. Errors stop a run; warnings are shown."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]

    def raise_for_errors(self) -> None:
        """Raises one `ConfigError` that lists all errors."""
        if self.errors:
            lines = "\n".join("  - " + error.replace("\n", "\n    ") for error in self.errors)
            count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
            raise ConfigError(f"this config cannot run ({count}):\n{lines}")


def validate_config(
    config: RLTrainConfig, *, num_devices: int | None = None, ready_to_train: bool = False
) -> Validation:
    """Checks a config without building anything.

    Args:
        config: what to check.
        num_devices: accelerators of the run; None: the number is unknown, and only the config itself is checked.
        ready_to_train: dataset and norm statistics must be there; otherwise their absence is a warning.
    """
    level: Level = "error" if ready_to_train else "warning"
    findings = [
        *check_bounds(config),
        # Parts of the config, by themselves.
        *check_agent(config),
        *checks.check_policy(config),
        *checks.check_learning_rates(config),
        *checks.check_run(config),
        *checks.check_average(config),
        *checks.check_alerts(config, level),
        # Parts that must fit each other.
        *checks.check_batch(config, num_devices),
        *checks.check_chunks(config),
        *checks.check_noise(config),
        *checks.check_online(config, level),
        *checks.check_baselines(config),
        *checks.check_score(config),
        *checks.check_cloning(config),
        *checks.check_data(config),
        *checks.check_files(config, level),
    ]
    return Validation(
        errors=tuple(message for level, message in findings if level == "error"),
        warnings=tuple(message for level, message in findings if level == "warning"),
    )
