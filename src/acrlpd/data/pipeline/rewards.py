"""Rewards and terminals of every step, from a dataset's own columns or from labels.

A terminal is a success: the step after which nothing more can be gained. The end of a recording that
is no success (a time limit, an operator who stopped) is not a terminal, and the critic bootstraps
through it or leaves it alone. Steps recorded after the success earn nothing.
"""

import dataclasses

import numpy as np

from acrlpd.config import RewardConfig
from acrlpd.data.sources.labels import Labels
from acrlpd.data.sources.source import ColumnTable, DatasetError


@dataclasses.dataclass(frozen=True)
class StepRewards:
    """Rewards of all episodes end to end, in the order of the table they were made from."""

    rewards: np.ndarray  # float32 [N], scaled and shifted; 0 after the terminal
    terminals: np.ndarray  # bool [N], at most one per episode
    after_terminal: np.ndarray  # bool [N], steps recorded after the terminal
    success: np.ndarray  # bool [episodes]
    origin: str  # where they came from, in words


def environment_rewards(config: RewardConfig, origin: str | None) -> RewardConfig:
    """How episodes that the policy lives get their rewards, given where those of its data came from.

    The environment's reward where the data has a reward of its own, else its success: labels are for
    datasets. Where the origin is not known (None), the config's word counts.
    """
    if origin is None:
        own = config.source in ("auto", "reward_column")
    else:
        own = f"{origin},".startswith(f"column {config.reward_column},")
    return dataclasses.replace(
        config,
        source="reward_column" if own else "success_column",
        labels_file=None,
        # What the environments' adapter calls them.
        reward_column="next.reward",
        success_column="next.success",
        done_column="next.done",
    )


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
        return _finish(table, config, _sparse(success, config), success, f"column {config.success_column}")
    return _from_reward_column(table, config)


def require_success_in_time(table: ColumnTable, rewards: StepRewards, config: RewardConfig) -> None:
    """Refuses a success column that repeats on every step how the episode ends.

    Success at the first step leaves nothing before it to learn from. Where all successes are of that kind, the
    column is about episodes, not about steps.
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
    success = np.zeros(table.offsets[-1], bool)
    success[last] = [label.success for label in episodes]
    rewards = _sparse(success, config)
    for row, label in zip(last, episodes, strict=True):
        if label.reward is not None:
            rewards[row] = label.reward
    return _finish(table, config, rewards, success, f"labels in {labels.path}")


def _from_reward_column(table: ColumnTable, config: RewardConfig) -> StepRewards:
    """The dataset's own rewards; success from its success column, or from how its rewards end.

    Without a success column, a success is where an episode is done (or ends) on a reward that marks one:
    above 0, or, in a dataset that only knows costs, 0.
    """
    rewards = np.array(_column(table, config.reward_column), np.float32)
    origin = f"column {config.reward_column}"
    if config.success_column in table.columns:
        success = _column(table, config.success_column) > 0
    else:
        done = np.zeros(len(rewards), bool)
        done[table.offsets[1:] - 1] = True
        if config.done_column in table.columns:
            done |= _column(table, config.done_column) > 0
        costs_only = bool(np.all(rewards <= 0) and np.any(rewards < 0))
        success = done & (rewards >= 0 if costs_only else rewards > 0)
        origin += ", success where an episode ends on " + ("no cost" if costs_only else "a reward")
    return _finish(table, config, rewards, success, origin)


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
    """1 where there is success and 0 elsewhere, or 0 there and -1 elsewhere."""
    rewards = success.astype(np.float32)
    return rewards if config.kind == "zero_one" else rewards - 1


def _finish(
    table: ColumnTable, config: RewardConfig, rewards: np.ndarray, success: np.ndarray, origin: str
) -> StepRewards:
    """Ends every episode at its first success."""
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        position = int(np.searchsorted(table.offsets, row, side="right") - 1)
        raise DatasetError(
            f"reward of step {row - int(table.offsets[position])} in the episode at position {position} "
            f"is {rewards[row]} ({origin})"
        )
    starts, lengths = table.offsets[:-1], np.diff(table.offsets)
    rows = np.arange(len(rewards))
    first = np.minimum.reduceat(np.where(success, rows, len(rows)), starts)  # [episodes]
    first_of_row = np.repeat(first, lengths)
    after = rows > first_of_row
    scaled = rewards * np.float32(config.scale) + np.float32(config.bias)
    return StepRewards(
        rewards=np.where(after, np.float32(0), scaled).astype(np.float32),
        terminals=rows == first_of_row,
        after_terminal=after,
        success=first < len(rows),
        origin=origin,
    )
