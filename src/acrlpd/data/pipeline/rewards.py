"""Rewards and terminals of every step: from the dataset's own columns, or from labels beside the dataset.

A success is a terminal: nothing more can be gained after that step. A failure is a terminal if the config gives it a
reward. The end of a recording for any other reason (a time limit, an operator who stopped) is not a terminal; the
critic bootstraps through it or does not learn from it. Steps recorded after the success earn nothing, unless the data
is play: then the recording goes on after a success as before.
"""

import dataclasses
import enum
from pathlib import Path

import numpy as np

from acrlpd.config import RewardConfig
from acrlpd.data.pipeline.labels import Labels, Outcomes, labels_path, load_labels
from acrlpd.data.sources.source import ColumnTable, DatasetError, EpisodeSource


class RewardOrigin(enum.Enum):
    """Where the rewards of a dataset came from; checkpoints keep the name."""

    LABELS = enum.auto()
    REWARD_COLUMN = enum.auto()
    SUCCESS_COLUMN = enum.auto()

    def describe(self, config: RewardConfig) -> str:
        """The origin in words."""
        if self is RewardOrigin.LABELS:
            return "labels" if config.labels_file is None else f"labels in {config.labels_file}"
        column = config.reward_column if self is RewardOrigin.REWARD_COLUMN else config.success_column
        return f"column {column}"


@dataclasses.dataclass(frozen=True)
class StepRewards:
    """Rewards of all episodes end to end, in the order of the table they were made from."""

    rewards: np.ndarray  # float32 [N], scaled and shifted; 0 after the end of the episode
    terminals: np.ndarray  # bool [N], successes that count, and failures that have a reward
    after_terminal: np.ndarray  # bool [N], steps recorded after the terminal that ended the episode
    leads_to_success: np.ndarray  # bool [N], steps up to the success, or up to the last one of an episode of play
    success: np.ndarray  # bool [episodes]
    failure: np.ndarray  # bool [episodes], known to have failed; an episode may be neither
    origin: RewardOrigin

    @property
    def outcomes(self) -> Outcomes:
        successes, failures = int(self.success.sum()), int(self.failure.sum())
        return Outcomes(successes, failures, len(self.success) - successes - failures)


@dataclasses.dataclass(frozen=True)
class DatasetRewards:
    """The rewards of all episodes of a dataset.

    What marks a success may follow from all rewards together. So the rewards are computed first, and then taken apart
    into those of the episodes to train on and those of the held-out episodes.
    """

    indices: tuple[int, ...]  # the dataset's own numbers of the episodes
    offsets: np.ndarray  # int64 [episodes + 1], the episodes' first rows
    steps: StepRewards

    def of(self, source: EpisodeSource) -> StepRewards:
        """The rewards of the episodes that a source has left, in its order."""
        places = {index: place for place, index in enumerate(self.indices)}
        episodes = [places[index] for index in source.indices]
        rows = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in episodes])
        return StepRewards(
            rewards=self.steps.rewards[rows],
            terminals=self.steps.terminals[rows],
            after_terminal=self.steps.after_terminal[rows],
            leads_to_success=self.steps.leads_to_success[rows],
            success=self.steps.success[episodes],
            failure=self.steps.failure[episodes],
            origin=self.steps.origin,
        )


def environment_rewards(config: RewardConfig, origin: RewardOrigin | None) -> RewardConfig:
    """How episodes that the policy lives get their rewards, given where the rewards of its data came from.

    If the data has rewards of its own, the environment's rewards count, otherwise the environment's success: nobody
    labels what the policy lives. If the origin is not known (None), the config decides.
    """
    own = config.source in ("auto", "reward_column") if origin is None else origin is RewardOrigin.REWARD_COLUMN
    return dataclasses.replace(
        config,
        success_ends_episode=True,
        source="reward_column" if own else "success_column",
        labels_file=None,
        # The adapter of environments gives its columns these names.
        reward_column="next.reward",
        success_column="next.success",
        done_column="next.done",
        truncated_column="next.truncated",
    )


def read_rewards(source: EpisodeSource, table: ColumnTable, config: RewardConfig) -> StepRewards:
    """Rewards of the episodes of a source, whose columns are in `table`; labels come from their file."""
    named = config.labels_file
    labels = load_labels(labels_path(source.root) if named is None else Path(named), source)
    if named is not None and labels is None:
        raise DatasetError(f"data.rewards.labels_file={named}: no such file; write it with `acrlpd data label`")
    rewards = compute_rewards(table, source.indices, config, labels)
    if config.success_ends_episode:
        require_success_in_time(table, rewards, config)
    return rewards


def compute_rewards(
    table: ColumnTable, indices: tuple[int, ...], config: RewardConfig, labels: Labels | None
) -> StepRewards:
    """Rewards of the table's steps; `indices` are the dataset's own numbers of its episodes."""
    source = config.source
    if source == "auto":
        if labels is not None:
            source = "labels"
        elif config.reward_column in table.columns:
            source = "reward_column"
        elif config.success_column in table.columns:
            source = "success_column"
        else:
            raise DatasetError(
                f"the dataset says nothing about rewards: there is no column {config.reward_column!r} or "
                f"{config.success_column!r} and no labels file. Label its episodes with `acrlpd data label`, "
                "or name the columns in data.rewards"
            )
    if source == "labels":
        return _from_labels(table, indices, config, labels)
    if source == "success_column":
        success = _column(table, config.success_column) > 0
        failure = _ended_without(success, table, config)
        rewards = _with_failures(_sparse(success, config), table, failure, config)
        return _finish(table, config, rewards, success, failure, RewardOrigin.SUCCESS_COLUMN)
    return _from_reward_column(table, config)


def require_success_in_time(table: ColumnTable, rewards: StepRewards, config: RewardConfig) -> None:
    """Refuses a success column that repeats on every step how the episode ends.

    A success at the first step leaves nothing before it to learn from. If all successes are of that kind, the column
    describes episodes and not steps.
    """
    lengths = np.diff(table.offsets)
    if config.success_column not in table.columns or not rewards.success.any():
        return
    at_once = rewards.terminals[table.offsets[:-1]] & (lengths > 1)
    if at_once[rewards.success].all():
        raise DatasetError(
            f"column {config.success_column!r} is true from the first step of every success on: it says how an episode "
            "ends, not when. Make labels from it with "
            f"`acrlpd data label DATASET --rule 'max({config.success_column}) > 0'`"
        )


def _from_labels(
    table: ColumnTable, indices: tuple[int, ...], config: RewardConfig, labels: Labels | None
) -> StepRewards:
    if labels is None:
        raise DatasetError("data.rewards.source=labels, but there is no labels file; run `acrlpd data label`")
    missing = [index for index in indices if index not in labels.episodes]
    if missing:
        raise DatasetError(
            f"{len(missing)} of {len(indices)} episodes have no label in {labels.path}: "
            f"{', '.join(map(str, missing[:10]))}{', ...' if len(missing) > 10 else ''}. "
            "Label them with `acrlpd data label`"
        )
    episodes = [labels.episodes[index] for index in indices]
    last = table.offsets[1:] - 1
    success = np.zeros(table.num_rows, bool)
    success[last] = [label.success for label in episodes]
    failure = ~success[last]
    rewards = _with_failures(_sparse(success, config), table, failure, config)
    for row, label in zip(last, episodes, strict=True):
        if label.reward is not None:
            rewards[row] = label.reward
    return _finish(table, config, rewards, success, failure, RewardOrigin.LABELS)


def _from_reward_column(table: ColumnTable, config: RewardConfig) -> StepRewards:
    """The dataset's own rewards; success from its success column, or from how its rewards end.

    Without a success column, an episode succeeds if it is done (or ends) on a reward that marks a success: above 0,
    or, in a dataset that has only costs, 0.
    """
    rewards = np.array(_column(table, config.reward_column), np.float32)
    if config.success_column in table.columns:
        success = _column(table, config.success_column) > 0
    else:
        done = np.zeros(len(rewards), bool)
        done[table.offsets[1:] - 1] = True
        if config.done_column in table.columns:
            done |= _column(table, config.done_column) > 0
        costs_only = bool(np.all(rewards <= 0) and np.any(rewards < 0))
        success = done & (rewards >= 0 if costs_only else rewards > 0)
    failure = _ended_without(success, table, config)
    rewards = _with_failures(rewards, table, failure, config)
    return _finish(table, config, rewards, success, failure, RewardOrigin.REWARD_COLUMN)


def _ended_without(success: np.ndarray, table: ColumnTable, config: RewardConfig) -> np.ndarray:
    """bool [episodes]: whether the columns say that an episode came to its end without success, before any time limit.

    LeRobot marks the last step of every episode as done. Only with the truncated column is the reason known.
    """
    if not {config.done_column, config.truncated_column} <= table.columns.keys():
        return np.zeros(len(table.offsets) - 1, bool)
    last = table.offsets[1:] - 1
    ended = (_column(table, config.done_column)[last] > 0) & ~(_column(table, config.truncated_column)[last] > 0)
    return ended & ~np.logical_or.reduceat(success, table.offsets[:-1])


def _with_failures(rewards: np.ndarray, table: ColumnTable, failure: np.ndarray, config: RewardConfig) -> np.ndarray:
    """The rewards, with that of a failure at the last step of the episodes that failed."""
    if config.failure_reward is not None:
        rewards[table.offsets[1:][failure] - 1] = config.failure_reward
    return rewards


def _column(table: ColumnTable, name: str) -> np.ndarray:
    if name not in table.columns:
        raise DatasetError(
            f"data.rewards asks for the column {name!r}; the dataset has {', '.join(sorted(table.columns))}"
        )
    column = table.columns[name]
    if column.ndim != 1:
        raise DatasetError(f"column {name!r} must have one value per step, found shape {list(column.shape)}")
    return column


def _sparse(success: np.ndarray, config: RewardConfig) -> np.ndarray:
    """1 at a success and 0 elsewhere, or 0 at a success and -1 elsewhere."""
    rewards = success.astype(np.float32)
    return rewards if config.kind == "zero_one" else rewards - 1


def _finish(
    table: ColumnTable,
    config: RewardConfig,
    rewards: np.ndarray,
    success: np.ndarray,
    failure: np.ndarray,
    origin: RewardOrigin,
) -> StepRewards:
    """Ends every episode at its first success, unless successes do not end the episodes of this data."""
    if not np.isfinite(rewards).all():
        bad_rows = np.flatnonzero(~np.isfinite(rewards))
        row, position = int(bad_rows[0]), int(table.episodes_of(bad_rows)[0])
        raise DatasetError(
            f"reward of step {row - int(table.offsets[position])} in the episode at position {position} "
            f"is {rewards[row]} ({origin.describe(config)})"
        )
    starts, lengths, rows = table.offsets[:-1], np.diff(table.offsets), np.arange(len(rewards))
    last = table.offsets[1:] - 1
    if config.success_ends_episode:
        first_success = np.repeat(np.minimum.reduceat(np.where(success, rows, len(rows)), starts), lengths)
        terminals, after = rows == first_success, rows > first_success
        leads_to_success = ~after & (first_success < len(rows))
    else:
        terminals, after = success.copy(), np.zeros_like(success)
        terminals[last] = False  # The recording stops here, but not because of the success.
        leads_to_success = rows <= np.repeat(np.maximum.reduceat(np.where(success, rows, -1), starts), lengths)
    if config.failure_reward is not None:
        terminals[last[failure]] = True
    scaled = rewards * np.float32(config.scale) + np.float32(config.bias)
    return StepRewards(
        rewards=np.where(after, np.float32(0), scaled).astype(np.float32),
        terminals=terminals,
        after_terminal=after,
        leads_to_success=leads_to_success,
        success=np.logical_or.reduceat(success, starts),
        failure=failure,
        origin=origin,
    )
