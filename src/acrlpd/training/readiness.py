"""Whether a run could begin: the checks of the config itself, and all files of the run."""

import pathlib
from collections.abc import Sequence

import jax

from acrlpd.config import RLTrainConfig, apply_config_overrides, validate_config
from acrlpd.config.validation import Validation
from acrlpd.data.pipeline.dataset_checks import Attempts, find_dataset_errors
from acrlpd.data.pipeline.tokenizer import create_tokenizer
from acrlpd.data.pipeline.transforms import create_action_tokens
from acrlpd.training.initial_weights import check_initial_weights


def require_ready(members: Sequence[RLTrainConfig], *, resume: bool) -> tuple[str, ...]:
    """Refuses runs that cannot begin, with everything that is wrong in one error; returns the warnings."""
    errors: list[str] = []
    warnings: list[str] = []
    for member in members:
        validation = validate_config(member, num_devices=jax.device_count(), ready_to_train=True)
        errors += (*validation.errors, *find_missing_parts(member, resume=resume))
        warnings += validation.warnings
    Validation(tuple(dict.fromkeys(errors)), ()).raise_for_errors()
    return tuple(dict.fromkeys(warnings))


def find_missing_parts(rl_config: RLTrainConfig, *, resume: bool) -> list[str]:
    """What is wrong with the dataset, the tokenizers and the initial weights, which a resumed run does not need.

    A dataset that does not exist, and weights without a path, are errors of the config, which were found already.
    """
    data, attempt = rl_config.data, Attempts()
    is_there = data.repo_id not in (None, "fake") if data.data_dir is None else pathlib.Path(data.data_dir).exists()
    errors = find_dataset_errors(rl_config) if is_there else []
    if rl_config.model.prompt_len:
        attempt(create_tokenizer, data.tokenizer, rl_config.model.prompt_len)
    attempt(create_action_tokens, rl_config)
    has_path = rl_config.weight_loader.kind == "none" or rl_config.weight_loader.path is not None
    if not resume and has_path:
        attempt(check_initial_weights, rl_config)
    return errors + attempt.errors


def skip_online_phase(rl_config: RLTrainConfig) -> tuple[RLTrainConfig, str | None]:
    """The config without an online phase if it has no environment to act in, and a warning about this.

    A run that would train online alone keeps its config, which is then refused.
    """
    training = rl_config.training
    if rl_config.env.id is not None or not (training.offline_steps and training.online_steps):
        return rl_config, None
    warning = (
        f"the {training.online_steps:,} online updates are skipped, because the config has no environment. Name one "
        "with --env.id (a gymnasium id, a name that acrlpd registers, or module:name of your own; "
        "docs/environments.md), or set --online_steps 0"
    )
    return apply_config_overrides(rl_config, online_steps=0), warning
