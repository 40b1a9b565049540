"""The norm statistics of a config: where they lie, how they are made of its dataset, and whether they fit its data."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acrlpd.config import DataConfig, RLTrainConfig
from acrlpd.data.pipeline.config_episodes import open_config_source, read_columns, read_windows, require_dims
from acrlpd.data.pipeline.norm_stats import (
    NormStats,
    NormStatsError,
    NormStatsOrigin,
    compute_norm_stats,
    load_norm_stats,
    load_norm_stats_origin,
    require_replaceable,
    save_norm_stats,
)
from acrlpd.data.pipeline.norm_stats_checks import check_norm_stats
from acrlpd.data.pipeline.transforms import (
    AbsoluteActions,
    DeltaActions,
    describe_statistics_transform,
    known_delta_mask,
    uses_quantiles,
)
from acrlpd.data.sources.source import DatasetError, EpisodeSource


def norm_stats_dir(config: DataConfig) -> Path:
    """<assets_dir>/<asset_id>, where the norm statistics of a config lie."""
    path = config.norm_stats_path
    if path is None:
        raise DatasetError("norm statistics need a name: set data.asset_id, data.data_dir or data.repo_id")
    return path.parent


def describe_origin(source: EpisodeSource, rl_config: RLTrainConfig) -> NormStatsOrigin:
    return NormStatsOrigin(
        dataset=source.identity,
        num_episodes=len(source),
        num_frames=int(source.lengths.sum()),
        action_horizon=rl_config.model.action_horizon,
        transforms=describe_statistics_transform(rl_config.data),
        path=str(source.root.resolve()),
    )


def write_norm_stats(rl_config: RLTrainConfig, *, overwrite: bool = False) -> tuple[Path, dict[str, NormStats]]:
    """Computes the norm statistics of a config's dataset and writes them where training looks for them.

    Statistics that another config may need are replaced only with `overwrite`.
    """
    directory = norm_stats_dir(rl_config.data)
    source = open_config_source(rl_config)
    origin = describe_origin(source, rl_config)
    if not overwrite:
        require_replaceable(directory, origin)
    table = read_columns(source, rl_config.data, rewards=False)
    read = functools.partial(read_windows, table, rl_config)
    require_dims(read(np.arange(1)), rl_config)
    norm_stats = compute_norm_stats(table.num_rows, read, rl_config.data.normalize)
    save_norm_stats(directory, norm_stats, origin)
    return directory, norm_stats


def load_config_norm_stats(config: DataConfig) -> dict[str, NormStats] | None:
    """The norm statistics of a config's dataset; None for fake data, which has none."""
    if config.is_fake:
        return None
    directory = norm_stats_dir(config)
    try:
        return load_norm_stats(directory)
    except NormStatsError as error:
        raise NormStatsError(f"{error} (data.assets_dir={config.assets_dir}, asset_id={directory.name})") from error


def check_statistics(
    norm_stats: Mapping[str, NormStats], sample: dict[str, Any], rl_config: RLTrainConfig, origin: NormStatsOrigin
) -> list[str]:
    """Raises NormStatsError where the statistics are wrong for a sample of the data; returns warnings."""
    config = rl_config.data
    # The actions of the sample, absolute if the run has relative actions and the reverse; None without a mask.
    counterpart, mask = None, known_delta_mask(config)
    if mask is not None:
        toggle = AbsoluteActions(mask) if config.use_delta_joint_actions else DeltaActions(mask)
        counterpart = toggle(sample)["actions"]
    return check_norm_stats(
        norm_stats,
        load_norm_stats_origin(norm_stats_dir(config)),
        origin,
        sample,
        counterpart=counterpart,
        use_quantiles=uses_quantiles(rl_config),
        padded_dim=rl_config.model.action_dim,
        normalized=config.normalize,
        follow_dataset=config.asset_id is None,
    )
