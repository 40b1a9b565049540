"""How episodes go on after each of their steps: what improvements that label prompts learn from (RECAP).

An episode that does not succeed has failed, whatever ended its recording: a time limit says that the task took too
long. A human correction is known from a column of the dataset; the names are those of LeRobot and of other recorders.
"""

from types import ModuleType

import flax.struct
import numpy as np

from acrlpd.batch import Returns
from acrlpd.data.pipeline.rewards import StepRewards
from acrlpd.data.sources.source import ColumnTable
from acrlpd.models.observation import Array

# Columns that say of each step whether a human, who took over from the policy, chose its action.
INTERVENTION_COLUMNS = ("intervention", "complementary_info.is_intervention", "intervene_flag")


def rows_ahead(rows: Array, last: Array, count: int, xp: ModuleType = np) -> tuple[Array, Array]:
    """The rows [B, count] of the steps from `rows` [B] on, and whether they lie inside of episodes that end at `last`.

    Past the end of an episode its last row repeats. `xp` is numpy, or jax.numpy on the devices.
    """
    ahead = rows[:, None] + xp.arange(count)
    return xp.minimum(ahead, last[:, None]), ahead <= last[:, None]


@flax.struct.dataclass
class StepReturns:
    """The returns of all steps of a table; rewards are those of `acrlpd.batch.Returns`."""

    return_to_go: Array  # float32 [N], in [-1, 0]
    step_cost: Array  # float32 [N]
    success: Array  # bool [N], the steps that succeed
    after_success: Array  # bool [N], steps that are not part of the task any more
    human: Array  # bool [N]

    def of_windows(self, rows: Array, last: Array, horizons: tuple[int, int], xp: ModuleType = np) -> Returns:
        """The returns of windows that start at `rows` of episodes whose last rows are `last`, [B] each.

        `horizons` are the steps H of a target and T of a chunk. `xp` is numpy, or jax.numpy on the devices.
        """
        horizon_length, action_horizon = horizons
        ahead, inside = rows_ahead(rows, last, max(horizons), xp)
        success = (self.success[ahead] & inside)[:, :horizon_length]
        succeeds, goes_on = xp.any(success, axis=1), rows + horizon_length <= last
        steps = xp.where(succeeds, xp.argmax(success, axis=1), horizon_length).astype(np.float32)
        human = xp.all(self.human[ahead] | ~inside, axis=1, where=xp.arange(max(horizons)) < action_horizon)
        fields = {
            "return_to_go": self.return_to_go[rows],
            "rewards": -steps * self.step_cost[rows],
            "continues": goes_on & ~succeeds,
            "fails": ~goes_on & ~succeeds,
            "counts": ~self.after_success[rows],
            "human": human,
        }
        return Returns(**{name: values.astype(np.float32) for name, values in fields.items()})


def find_successes(table: ColumnTable, rewards: StepRewards) -> np.ndarray:
    """The steps of the table that succeed, bool [N]."""
    ends = rewards.terminals.copy()
    # The last step of play data may be a success that is no terminal, because the recording stops there anyway.
    ends[table.offsets[1:] - 1] = True
    return rewards.leads_to_success & ends


def compute_returns(table: ColumnTable, rewards: StepRewards, task_ids: np.ndarray) -> StepReturns:
    """The returns of the table's steps; `task_ids` [N] are equal for steps of the same task."""
    starts, lengths, rows = table.offsets[:-1], np.diff(table.offsets), np.arange(table.num_rows)
    last = np.repeat(table.offsets[1:] - 1, lengths)
    success = find_successes(table, rewards)
    next_success = _next_success(success, rows, starts, lengths)
    tasks, task_of_row = np.unique(task_ids, return_inverse=True)
    longest = np.zeros(len(tasks), np.int64)
    np.maximum.at(longest, task_of_row, np.repeat(lengths, lengths))
    step_cost = 1.0 / longest[task_of_row]
    succeeds, after_success = next_success <= last, rewards.after_terminal & ~success
    return_to_go = np.where(succeeds, np.maximum(-(next_success - rows) * step_cost, -1.0), -1.0)
    return StepReturns(
        return_to_go=np.where(after_success, 0.0, return_to_go).astype(np.float32),
        step_cost=step_cost.astype(np.float32),
        success=success,
        after_success=after_success,
        human=_read_interventions(table),
    )


def _next_success(success: np.ndarray, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The row of the first success at or after each row, int [N]; beyond the episode where there is none."""
    nowhere = len(rows)
    at_or_after = np.minimum.accumulate(np.where(success, rows, nowhere)[::-1])[::-1]
    ends = np.repeat(starts + lengths, lengths)
    return np.where(at_or_after < ends, at_or_after, nowhere)


def _read_interventions(table: ColumnTable) -> np.ndarray:
    """bool [N], from the first of the known columns that the table has; all false without such a column."""
    for name in INTERVENTION_COLUMNS:
        if name in table.columns:
            column = table.columns[name]
            return np.asarray(column.reshape(len(column), -1).any(axis=1))
    return np.zeros(table.num_rows, bool)
