"""Everything about the dataset of a config that would stop a run, found at once, before anything long begins."""

import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.decoded import open_frame_store
from acrlpd.data.pipeline.dataset import (
    check_statistics,
    choose_episodes,
    describe_origin,
    fill_prompts,
    load_config_norm_stats,
    open_config_source,
    read_all_rewards,
    read_columns,
    require_action_tokens,
    require_cameras,
    require_dims,
    require_labelled_prompts,
    reward_columns,
    sample_windows,
)
from acrlpd.data.pipeline.outcomes import require_outcomes
from acrlpd.data.sources.source import EpisodeSource

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
    """Prompts, labels and outcomes of the episodes that the run uses; the prompts, if the policy reads them.

    Only columns of rewards are read.
    """
    used, rewards = source, attempt(read_all_rewards, source, rl_config.data)
    if rewards is not None:
        chosen = attempt(choose_episodes, source, rl_config.data, rewards)
        if chosen is None:
            return None
        used, _ = chosen
    table = attempt(used.read_columns, reward_columns(used, rl_config.data))
    if table is None:
        return None
    if rewards is not None:
        attempt(require_outcomes, rewards.of(used), rl_config)
    return attempt(fill_prompts, used, table, rl_config.data) if rl_config.model.prompt_len else None


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
