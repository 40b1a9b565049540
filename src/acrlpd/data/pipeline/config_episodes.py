"""What a run reads from the dataset of its config: episodes, rewards, columns, prompts and windows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from acrlpd.config import DataConfig, RLTrainConfig
from acrlpd.data.pipeline.held_out_choice import held_out_episodes
from acrlpd.data.pipeline.outcomes import OutcomeError
from acrlpd.data.pipeline.returns import INTERVENTION_COLUMNS, rows_ahead
from acrlpd.data.pipeline.rewards import DatasetRewards, read_rewards
from acrlpd.data.pipeline.transforms import create_statistics_transform
from acrlpd.data.sources.fake import create_fake_source
from acrlpd.data.sources.source import NOISE_COLUMN, ColumnTable, DatasetError, EpisodeSource, open_source


def open_config_source(rl_config: RLTrainConfig) -> EpisodeSource:
    """The episodes that a config names."""
    config = rl_config.data
    if config.is_fake:
        return create_fake_source(rl_config)
    name = config.repo_id if config.data_dir is None else config.data_dir
    if name is None:
        raise DatasetError("no dataset is given: set data.data_dir to a directory or data.repo_id to a hub id")
    return open_source(name, on_bad_episode=config.on_bad_episode)


def read_all_rewards(source: EpisodeSource, config: DataConfig) -> DatasetRewards:
    """The rewards of all episodes that a run may use: the first `max_episodes`, whatever becomes of them."""
    if config.max_episodes is not None:
        late = source.indices[config.max_episodes :]
        source = source.without(dict.fromkeys(late, f"beyond data.max_episodes={config.max_episodes}"))
    source.require_episodes()
    table = source.read_columns(_reward_columns(source, config))
    return DatasetRewards(source.indices, table.offsets, read_rewards(source, table, config.rewards))


def choose_episodes(
    source: EpisodeSource, config: DataConfig, rewards: DatasetRewards, kept: frozenset[int] | None = None
) -> tuple[EpisodeSource, EpisodeSource | None]:
    """The episodes to train on, and the episodes that are held out for validation, if there are any.

    Both are episodes that have rewards. The held-out episodes do not depend on `episode_filter`, so that a run and its
    baselines are validated alike.
    """
    late = set(source.indices).difference(rewards.indices)
    everything = source.without(dict.fromkeys(late, f"beyond data.max_episodes={config.max_episodes}"))
    everything.require_episodes()
    success = dict(zip(everything.indices, rewards.of(everything).success.tolist(), strict=True))
    if kept is None:
        held_out = held_out_episodes(tuple(success), config.validation_share, success)
    else:
        held_out = kept & success.keys()
    source = everything.without(dict.fromkeys(held_out, "held out for validation (data.validation_share)"))
    if config.episode_filter == "success":
        failed = [index for index in source.indices if not success[index]]
        if len(failed) == len(source):
            raise OutcomeError(f"{source.root}: data.episode_filter=success leaves none of {len(source)} episodes")
        source = source.without(dict.fromkeys(failed, "no success (data.episode_filter)"))
    if not held_out:
        return source, None
    trained_on = [index for index in everything.indices if index not in held_out]
    return source, everything.without(dict.fromkeys(trained_on, "not held out for validation"))


def _reward_columns(source: EpisodeSource, config: DataConfig) -> list[str]:
    """The columns of a source that its rewards and returns are made from; labels need no column."""
    wanted = config.rewards
    named = (wanted.reward_column, wanted.success_column, wanted.done_column, wanted.truncated_column)
    names = [name for name in (*named, *INTERVENTION_COLUMNS) if name in source.column_names]
    if wanted.source in ("reward_column", "success_column"):
        names.append(getattr(wanted, wanted.source))  # The source names its columns if this column is missing.
    return list(dict.fromkeys(names))


def read_columns(source: EpisodeSource, config: DataConfig, *, rewards: bool) -> ColumnTable:
    """The columns of a config; state and actions as float32 [N, d], scalars included."""
    values = (*config.repack.state, *config.repack.actions)
    names = [*values, *(_reward_columns(source, config) if rewards else ())]
    if NOISE_COLUMN in source.column_names:
        names.append(NOISE_COLUMN)
    table = source.read_columns(list(dict.fromkeys(names)))
    columns = dict(table.columns)
    for name in values:
        columns[name] = np.ascontiguousarray(columns[name].reshape(len(columns[name]), -1), np.float32)
    return dataclasses.replace(table, columns=columns)


def fill_prompts(source: EpisodeSource, table: ColumnTable, config: DataConfig) -> np.ndarray:
    """The table's distinct prompts, with the default where a step has no task: str [distinct prompts]."""
    tasks = table.prompts if config.prompt_from_task else (None,) * len(table.prompts)
    prompts = [task or config.default_prompt for task in tasks]
    if None in prompts:
        raise DatasetError(f"{source.root}: some steps have no task to make a prompt from; set data.default_prompt")
    return np.array(prompts)


def read_windows(table: ColumnTable, rl_config: RLTrainConfig, rows: np.ndarray) -> dict[str, Any]:
    """State [n, s] and actions [n, T, a] of the windows that start at `rows`, before normalisation.

    As in openpi, a chunk that reaches past its episode repeats the last action.
    """
    last = table.offsets[table.episodes_of(rows) + 1] - 1
    steps, _ = rows_ahead(rows, last, rl_config.model.action_horizon)
    data = {name: table.columns[name][rows] for name in rl_config.data.repack.state}
    data |= {name: table.columns[name][steps] for name in rl_config.data.repack.actions}
    return create_statistics_transform(rl_config)(data)


def require_dims(sample: Mapping[str, np.ndarray], rl_config: RLTrainConfig) -> None:
    action_dim, found = rl_config.qchunking.action_dim, sample["actions"].shape[-1]
    if found != action_dim:
        raise DatasetError(
            f"the actions {rl_config.data.repack.actions} have {found} dims, but qchunking.action_dim is {action_dim}"
        )
    state_dim, wanted = sample["state"].shape[-1], rl_config.model.state_dim
    if state_dim != wanted and not rl_config.model.pads_actions:
        raise DatasetError(
            f"the state {rl_config.data.repack.state} has {state_dim} dims, but model.state_dim is {wanted}"
        )
