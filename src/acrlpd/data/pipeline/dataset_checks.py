"""What about the dataset of a config would stop a run: the checks, and all of them at once before anything long begins.

`open_dataset` makes the same checks with all episodes, and stops at the first error.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.decoded import open_frame_store
from acrlpd.data.pipeline.config_episodes import (
    choose_episodes,
    fill_prompts,
    open_config_source,
    read_all_rewards,
    read_columns,
    read_windows,
    require_dims,
)
from acrlpd.data.pipeline.config_norm_stats import check_statistics, describe_origin, load_config_norm_stats
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.outcomes import needs_outcomes, require_and_report_outcomes, require_outcomes
from acrlpd.data.pipeline.tokenizer import LABELS, add_label, create_tokenizer
from acrlpd.data.pipeline.transforms import Normalize, create_action_tokens, uses_quantiles
from acrlpd.data.sources.source import ColumnTable, DatasetError, EpisodeSource
from acrlpd.models.families.base import PolicyConfig

logger = logging.getLogger(__name__)

# Windows looked at when statistics are checked against the data.
_CHECKED_WINDOWS = 2_000
# Episodes whose states and actions are looked at; the run itself looks at all of them.
_LOOKED_AT = 64

P = ParamSpec("P")
T = TypeVar("T")


class Attempts:
    """Calls functions, and collects the errors of a user that they raise."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """The result of the function; None after an error."""
        try:
            return function(*args, **options)
        except (ValueError, OSError) as error:
            self.errors.append(str(error))
            return None


def find_dataset_errors(rl_config: RLTrainConfig) -> list[str]:
    """What is wrong with dataset, cameras, frame cache, prompts, labels, columns and norm statistics.

    Files that are missing altogether are found by the checks of the config. No frame is decoded.
    """
    attempt = Attempts()
    source = attempt(_open, rl_config)
    if source is not None:
        with contextlib.closing(source):
            _check(attempt, source, rl_config)
    return attempt.errors


def _check(attempt: Attempts, source: EpisodeSource, rl_config: RLTrainConfig) -> None:
    data, model = rl_config.data, rl_config.model
    cameras = {slot: camera for slot, camera in data.repack.cameras.items() if slot in model.image_keys}
    attempt(require_cameras, source, cameras, model)
    if data.frame_cache_dir is not None and set(cameras.values()) <= set(source.cameras):
        attempt(_open_cache, source, rl_config, tuple(dict.fromkeys(cameras.values())))
    prompts = _check_rewards_and_prompts(attempt, source, rl_config)
    missing = [name for name in (*data.repack.state, *data.repack.actions) if name not in source.column_names]
    if missing:
        attempt.errors.append(f"data.repack names the columns {missing}; {source.root} has {source.column_names}")
    elif model.action_horizon > 0:  # A chunk without steps has been reported by the checks of the config.
        _check_columns(attempt, source, prompts, rl_config)


def _open(rl_config: RLTrainConfig) -> EpisodeSource:
    source = open_config_source(rl_config)
    source.require_episodes()
    return source


def _open_cache(source: EpisodeSource, rl_config: RLTrainConfig, cameras: tuple[str, ...]) -> None:
    height, width = rl_config.model.image_resolution
    open_frame_store(
        source, height=height, width=width, cameras=cameras, cache_dir=rl_config.data.frame_cache_dir
    ).close()


def _check_rewards_and_prompts(attempt: Attempts, source: EpisodeSource, rl_config: RLTrainConfig) -> np.ndarray | None:
    """Labels, outcomes and prompts of the episodes that the run uses; returns the prompts, if the policy reads them."""
    used, rewards = source, attempt(read_all_rewards, source, rl_config.data)
    if rewards is not None:
        chosen = attempt(choose_episodes, source, rl_config.data, rewards)
        if chosen is None:
            return None
        used, _ = chosen
        attempt(require_outcomes, rewards.of(used), rl_config)
    table = attempt(used.read_columns, ()) if rl_config.model.prompt_len else None
    return None if table is None else attempt(fill_prompts, used, table, rl_config.data)


def _check_columns(
    attempt: Attempts, source: EpisodeSource, prompts: np.ndarray | None, rl_config: RLTrainConfig
) -> None:
    """Dims, the length of labelled prompts, and norm statistics against a sample of the data."""
    chosen = set(np.linspace(0, len(source) - 1, min(_LOOKED_AT, len(source))).astype(int).tolist())
    some = source.without({index: "not looked at" for i, index in enumerate(source.indices) if i not in chosen})
    table = attempt(read_columns, some, rl_config.data, rewards=False)
    sample = None if table is None else attempt(sample_windows, table, rl_config)
    if sample is None:
        return
    attempt(require_dims, sample, rl_config)
    if prompts is not None and rl_config.labels_prompts:
        attempt(require_labelled_prompts, prompts, sample["state"].shape[-1], rl_config)
    path = rl_config.data.norm_stats_path
    norm_stats = attempt(load_config_norm_stats, rl_config.data) if path is not None and path.is_file() else None
    if norm_stats is not None:
        attempt(require_action_tokens, sample, norm_stats, rl_config)
        attempt(check_statistics, norm_stats, sample, rl_config, describe_origin(source, rl_config))


def check_outcomes(rl_config: RLTrainConfig) -> None:
    """Refuses a config whose settings need successes or failures that its dataset does not have; reads no frame."""
    if needs_outcomes(rl_config) or rl_config.data.episode_filter == "success":
        everything = open_config_source(rl_config)
        rewards = read_all_rewards(everything, rl_config.data)
        source, _ = choose_episodes(everything, rl_config.data, rewards)
        require_and_report_outcomes(rewards.of(source), rl_config)


def sample_windows(table: ColumnTable, rl_config: RLTrainConfig) -> dict[str, Any]:
    """State [n, s] and actions [n, T, a] of windows that are spread over the table, before normalisation."""
    rows = np.linspace(0, table.num_rows - 1, _CHECKED_WINDOWS).astype(np.int64)
    return read_windows(table, rl_config, np.unique(rows))


def require_cameras(source: EpisodeSource, cameras: Mapping[str, str], model: PolicyConfig) -> None:
    unknown = [f"data.repack.{slot} names the camera {c!r}" for slot, c in cameras.items() if c not in source.cameras]
    if unknown:
        raise DatasetError(f"{', '.join(unknown)}; {source.root} has {list(source.cameras)}")
    if model.image_keys and not cameras:
        raise DatasetError(
            f"the policy is given {model.image_keys}, but data.repack names no camera for any of them; "
            f"{source.root} has {list(source.cameras)}. Without cameras set model.image_keys=()"
        )
    black = [slot for slot in model.image_keys if slot not in cameras]
    if black:
        logger.warning(
            "no camera is given for %s: the policy computes black, masked images there. model.image_keys=%s saves that "
            "time",
            black,
            tuple(cameras),
        )


def require_labelled_prompts(prompts: np.ndarray, state_dim: int, rl_config: RLTrainConfig) -> None:
    """Refuses prompts that would be cut once they have their label, and the longest state where it is part of them."""
    model = rl_config.model
    tokenizer = create_tokenizer(rl_config.data.tokenizer, model.prompt_len, "refuse")
    longest_state = np.ones((1, state_dim)) if model.discrete_state_input else None
    for prompt in dict.fromkeys(prompts.tolist()):
        for label in LABELS:
            try:
                tokenizer.tokenize([add_label(prompt, label)], longest_state)
            except ValueError as error:
                raise DatasetError(
                    f"{add_label(prompt, label)!r}, the prompt with its label, cannot be used: {error}. Raise "
                    "model.max_token_len, or shorten the prompt"
                ) from error


def require_action_tokens(
    sample: dict[str, Any], norm_stats: Mapping[str, NormStats] | None, rl_config: RLTrainConfig
) -> None:
    """Refuses a sample of the data of which a policy that writes actions as tokens could not learn every chunk."""
    action_tokens = create_action_tokens(rl_config)
    if action_tokens is not None:
        action_tokens.write(Normalize(norm_stats, use_quantiles=uses_quantiles(rl_config))(sample)["actions"])
