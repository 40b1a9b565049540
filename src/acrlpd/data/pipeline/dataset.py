"""The dataset of a config: columns and rewards in memory, frames within reach, everything checked."""

import dataclasses
import functools
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from acrlpd.config import DataConfig, RLTrainConfig
from acrlpd.data.frames.decoded import open_frame_store
from acrlpd.data.frames.store import FrameStore
from acrlpd.data.pipeline.held_out_choice import held_out_episodes
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
from acrlpd.data.pipeline.outcomes import OutcomeError, needs_outcomes, require_and_report_outcomes
from acrlpd.data.pipeline.returns import INTERVENTION_COLUMNS, rows_ahead
from acrlpd.data.pipeline.rewards import DatasetRewards, StepRewards, read_rewards
from acrlpd.data.pipeline.tokenizer import LABELS, add_label, create_tokenizer
from acrlpd.data.pipeline.transforms import (
    AbsoluteActions,
    DeltaActions,
    Normalize,
    PolicyTransforms,
    create_action_tokens,
    create_policy_transforms,
    create_statistics_transform,
    describe_statistics_transform,
    known_delta_mask,
    uses_quantiles,
)
from acrlpd.data.sources.fake import create_fake_source
from acrlpd.data.sources.source import NOISE_COLUMN, ColumnTable, DatasetError, EpisodeSource, open_source
from acrlpd.models.families.base import PolicyConfig

logger = logging.getLogger(__name__)

# Windows looked at when statistics are checked against the data.
_CHECKED_WINDOWS = 2_000


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
    source = open_config_source(rl_config)
    if (warning := source.describe_skipped()) is not None:
        logger.warning("%s", warning)
    require_cameras(source, transforms.cameras, rl_config.model)
    origin = describe_origin(source, rl_config)  # statistics are of all episodes, also if the run trains on some
    rewards = read_all_rewards(source, config)
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
        source = frames.source  # a cache may lack episodes that could not be decoded
    source.require_episodes()
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


def check_outcomes(rl_config: RLTrainConfig) -> None:
    """Refuses a config whose settings need successes or failures that its dataset does not have; reads no frame."""
    if needs_outcomes(rl_config) or rl_config.data.episode_filter == "success":
        everything = open_config_source(rl_config)
        rewards = read_all_rewards(everything, rl_config.data)
        source, _ = choose_episodes(everything, rl_config.data, rewards)
        require_and_report_outcomes(rewards.of(source), rl_config)


def choose_episodes(
    source: EpisodeSource, config: DataConfig, rewards: DatasetRewards, kept: frozenset[int] | None = None
) -> tuple[EpisodeSource, EpisodeSource | None]:
    """The episodes to train on, and the episodes that are held out for validation, if there are any.

    The held-out episodes do not depend on `episode_filter`, so that a run and its baselines are validated alike.
    """
    everything = _first_episodes(source, config)
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


def _is_fake(config: DataConfig) -> bool:
    return config.repo_id == "fake" and config.data_dir is None


def open_config_source(rl_config: RLTrainConfig) -> EpisodeSource:
    """The episodes that a config names."""
    config = rl_config.data
    if _is_fake(config):
        return create_fake_source(rl_config)
    name = config.repo_id if config.data_dir is None else config.data_dir
    if name is None:
        raise DatasetError("no dataset is given: set data.data_dir to a directory or data.repo_id to a hub id")
    return open_source(name, on_bad_episode=config.on_bad_episode)


def norm_stats_dir(config: DataConfig) -> Path:
    """<assets_dir>/<asset_id>, where the norm statistics of a config lie."""
    path = config.norm_stats_path
    if path is None:
        raise DatasetError("norm statistics need a name: set data.asset_id, data.data_dir or data.repo_id")
    return path.parent


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
    norm_stats = compute_norm_stats(table.num_rows, read, rl_config.data.normalize)
    require_dims(read(np.arange(1)), rl_config)
    save_norm_stats(directory, norm_stats, origin)
    return directory, norm_stats


def read_all_rewards(source: EpisodeSource, config: DataConfig) -> DatasetRewards:
    """The rewards of all episodes that a run may use, those of the held-out episodes included."""
    source = _first_episodes(source, config)
    source.require_episodes()
    table = source.read_columns(reward_columns(source, config))
    return DatasetRewards(source.indices, table.offsets, read_rewards(source, table, config.rewards))


def _first_episodes(source: EpisodeSource, config: DataConfig) -> EpisodeSource:
    if config.max_episodes is None:
        return source
    late = source.indices[config.max_episodes :]
    return source.without(dict.fromkeys(late, f"beyond data.max_episodes={config.max_episodes}"))


def read_columns(source: EpisodeSource, config: DataConfig, *, rewards: bool) -> ColumnTable:
    """The columns of a config; state and actions as float32 [N, d], scalars included."""
    values = (*config.repack.state, *config.repack.actions)
    names = [*values, *(reward_columns(source, config) if rewards else ())]
    if NOISE_COLUMN in source.column_names:
        names.append(NOISE_COLUMN)
    table = source.read_columns(list(dict.fromkeys(names)))
    columns = dict(table.columns)
    for name in values:
        columns[name] = np.ascontiguousarray(columns[name].reshape(len(columns[name]), -1), np.float32)
    return dataclasses.replace(table, columns=columns)


def reward_columns(source: EpisodeSource, config: DataConfig) -> list[str]:
    """The columns of a source that its rewards and returns are made from; labels need no column."""
    wanted = config.rewards
    named = (wanted.reward_column, wanted.success_column, wanted.done_column, wanted.truncated_column)
    names = [name for name in (*named, *INTERVENTION_COLUMNS) if name in source.column_names]
    if wanted.source in ("reward_column", "success_column"):
        names.append(getattr(wanted, wanted.source))  # The source names its columns if this column is missing.
    return list(dict.fromkeys(names))


def fill_prompts(source: EpisodeSource, table: ColumnTable, config: DataConfig) -> np.ndarray:
    """The table's distinct prompts, with the default where a step has no task: str [distinct prompts]."""
    tasks = table.prompts if config.prompt_from_task else (None,) * len(table.prompts)
    prompts = [task or config.default_prompt for task in tasks]
    if None in prompts:
        raise DatasetError(f"{source.root}: some steps have no task to make a prompt from; set data.default_prompt")
    return np.array(prompts)


def load_config_norm_stats(config: DataConfig) -> dict[str, NormStats] | None:
    """The norm statistics of a config's dataset; None for fake data, which has none."""
    if _is_fake(config):
        return None
    directory = norm_stats_dir(config)
    try:
        return load_norm_stats(directory)
    except NormStatsError as error:
        raise NormStatsError(f"{error} (data.assets_dir={config.assets_dir}, asset_id={directory.name})") from error


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


def sample_windows(table: ColumnTable, rl_config: RLTrainConfig) -> dict[str, Any]:
    """State [n, s] and actions [n, T, a] of windows that are spread over the table, before normalisation."""
    rows = np.linspace(0, table.num_rows - 1, _CHECKED_WINDOWS).astype(np.int64)
    return read_windows(table, rl_config, np.unique(rows))


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


def require_action_tokens(
    sample: dict[str, Any], norm_stats: Mapping[str, NormStats] | None, rl_config: RLTrainConfig
) -> None:
    """Refuses a sample of the data of which a policy that writes actions as tokens could not learn every chunk."""
    action_tokens = create_action_tokens(rl_config)
    if action_tokens is not None:
        action_tokens.write(Normalize(norm_stats, use_quantiles=uses_quantiles(rl_config))(sample)["actions"])


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


def describe_origin(source: EpisodeSource, rl_config: RLTrainConfig) -> NormStatsOrigin:
    return NormStatsOrigin(
        dataset=source.identity,
        num_episodes=len(source),
        num_frames=int(source.lengths.sum()),
        action_horizon=rl_config.model.action_horizon,
        transforms=describe_statistics_transform(rl_config.data),
        path=str(source.root.resolve()),
    )


def read_windows(table: ColumnTable, rl_config: RLTrainConfig, rows: np.ndarray) -> dict[str, Any]:
    """State [n, s] and actions [n, T, a] of the windows that start at `rows`, before normalisation.

    As in openpi, a chunk that reaches past its episode repeats the last action.
    """
    last = table.offsets[table.episodes_of(rows) + 1] - 1
    steps, _ = rows_ahead(rows, last, rl_config.model.action_horizon)
    data = {name: table.columns[name][rows] for name in rl_config.data.repack.state}
    data |= {name: table.columns[name][steps] for name in rl_config.data.repack.actions}
    return create_statistics_transform(rl_config)(data)
