"""The dataset of a config: columns and rewards in memory, frames within reach, everything checked."""

import dataclasses
import logging
import zlib
from pathlib import Path
from typing import Self

import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.decoded import open_frame_store
from acrlpd.data.frames.store import FrameStore, read_manifest
from acrlpd.data.pipeline.config_episodes import (
    choose_episodes,
    fill_prompts,
    open_config_source,
    read_all_rewards,
    read_columns,
    require_dims,
)
from acrlpd.data.pipeline.config_norm_stats import (
    check_statistics,
    describe_origin,
    load_config_norm_stats,
    norm_stats_dir,
)
from acrlpd.data.pipeline.dataset_checks import (
    require_action_tokens,
    require_cameras,
    require_labelled_prompts,
    sample_windows,
)
from acrlpd.data.pipeline.norm_stats import NormStats, NormStatsOrigin
from acrlpd.data.pipeline.outcomes import require_and_report_outcomes
from acrlpd.data.pipeline.rewards import DatasetRewards, StepRewards
from acrlpd.data.pipeline.transforms import PolicyTransforms, create_policy_transforms
from acrlpd.data.sources.source import ColumnTable, EpisodeSource

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Episodes with everything that the windows of a run need."""

    source: EpisodeSource
    frames: FrameStore | None  # None: the policy is given no camera
    table: ColumnTable  # state and action columns float32 [N, d], and the columns of rewards
    rewards: StepRewards
    prompts: np.ndarray | None  # str [distinct prompts], the default filled in; None: the policy reads no prompt
    transforms: PolicyTransforms
    norm_stats: dict[str, NormStats] | None  # None only for fake data
    held_out: "Dataset | None" = None  # the episodes for validation, from which no batch is drawn
    kept: frozenset[int] | None = None  # the episodes that a run had held out before, if it goes on

    @property
    def held_out_indices(self) -> list[int]:
        """The numbers of the episodes for validation."""
        return [] if self.held_out is None else list(self.held_out.source.indices)

    @property
    def fingerprint(self) -> int:
        """A number that changes with the dataset and with the episodes chosen from it."""
        return zlib.crc32(repr((self.source.identity, self.source.indices)).encode())

    def close(self) -> None:
        """Closes the files, also those of the held-out episodes."""
        if self.frames is not None:
            self.frames.close()
        self.source.close()
        if self.held_out is not None:
            self.held_out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_dataset(rl_config: RLTrainConfig, kept: frozenset[int] | None = None) -> Dataset:
    """Opens the dataset of a config, and checks that all parts fit together.

    `kept` are the episodes that a run which goes on has held out so far; None: they are chosen now.
    """
    config = rl_config.data
    transforms = create_policy_transforms(rl_config)
    everything = source = open_config_source(rl_config)
    if transforms.cameras and config.frame_cache_dir is not None and config.on_bad_episode == "skip":
        # Left out before any episode is chosen, so that none is held out that has no frames.
        _, _, undecodable = read_manifest(Path(config.frame_cache_dir))
        source = everything.without(undecodable)
    if (warning := source.describe_skipped()) is not None:
        logger.warning("%s", warning)
    require_cameras(source, transforms.cameras, rl_config.model)
    origin = describe_origin(everything, rl_config)  # statistics are of all episodes, also if the run trains on some
    rewards = read_all_rewards(everything, config)
    source, validated_on = choose_episodes(source, config, rewards, kept)
    dataset = _read_dataset(source, rewards, rl_config, transforms, config.episodes_per_memory_pool)
    require_and_report_outcomes(dataset.rewards, rl_config)
    _check(dataset, rl_config, origin)
    dataset = dataclasses.replace(dataset, kept=kept)
    if validated_on is None:
        return dataset
    # Few frames of the held-out episodes are read, and each is read once.
    return dataclasses.replace(dataset, held_out=_read_dataset(validated_on, rewards, rl_config, transforms, pool=0))


def _read_dataset(
    source: EpisodeSource, rewards: DatasetRewards, rl_config: RLTrainConfig, transforms: PolicyTransforms, pool: int
) -> Dataset:
    """The episodes of a source as a dataset; a memory pool has room for `pool` decoded episodes."""
    source.require_episodes()
    config = rl_config.data
    frames = None
    if transforms.cameras:
        height, width = rl_config.model.image_resolution
        frames = open_frame_store(
            source,
            height=height,
            width=width,
            cameras=tuple(dict.fromkeys(transforms.cameras.values())),
            cache_dir=config.frame_cache_dir,
            episodes_per_memory_pool=pool,
        )
    table = read_columns(source, config, rewards=True)
    return Dataset(
        source=source,
        frames=frames,
        table=table,
        rewards=rewards.of(source),
        prompts=fill_prompts(source, table, config) if rl_config.model.prompt_len else None,
        transforms=transforms,
        norm_stats=load_config_norm_stats(config),
    )


def _check(dataset: Dataset, rl_config: RLTrainConfig, origin: NormStatsOrigin) -> None:
    """Refuses data that would lead to a shape error or to a policy that does not learn."""
    sample = sample_windows(dataset.table, rl_config)
    require_dims(sample, rl_config)
    if dataset.prompts is not None and rl_config.labels_prompts:
        require_labelled_prompts(dataset.prompts, sample["state"].shape[-1], rl_config)
    require_action_tokens(sample, dataset.norm_stats, rl_config)
    if dataset.norm_stats is not None:
        for warning in check_statistics(dataset.norm_stats, sample, rl_config, origin):
            logger.warning("%s: %s", norm_stats_dir(rl_config.data), warning)
