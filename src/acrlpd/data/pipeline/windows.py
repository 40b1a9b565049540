"""Random windows of episodes: which ones a step of training sees, and what is true inside them.

A window starts at step t of an episode of L steps. Its critic part is the H steps t..t+H-1, its policy
part the T >= H actions t..t+T-1, and its next observation is the one at t+H. All of it is index
arithmetic on whole batches.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from acrlpd.data.pipeline.rewards import StepRewards


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of the column table, and the fields of `acrlpd.batch.Batch` that follow from them alone."""

    rows: np.ndarray  # int64 [B] of step t
    next_rows: np.ndarray  # int64 [B] of step t + H, or of the episode's last step
    action_rows: np.ndarray  # int64 [B, T]; past the end the last step repeats
    valid: np.ndarray  # float32 [B, T]
    rewards: np.ndarray  # float32 [B, H]
    masks: np.ndarray  # float32 [B, H]
    terminals: np.ndarray  # float32 [B, H]
    next_terminal: np.ndarray  # float32 [B]
    sequence_mask: np.ndarray  # float32 [B]


def make_windows(
    offsets: np.ndarray,
    rewards: StepRewards,
    episodes: np.ndarray,
    steps: np.ndarray,
    *,
    horizon_length: int,
    action_horizon: int,
) -> Windows:
    """The windows that start at `steps` of the episodes at positions `episodes`; all of them in one go.

    The critic may learn from a window if its target can be known: a terminal lies within the H steps (so
    nothing comes after them), or the observation at t+H was recorded. A recording that just stops gives
    neither, and what was recorded after the terminal is not part of the task any more.
    """
    rows = offsets[episodes] + steps
    last = offsets[episodes + 1] - 1
    ahead = rows[:, None] + np.arange(action_horizon)
    inside = ahead <= last[:, None]
    action_rows = np.minimum(ahead, last[:, None])
    critic_rows, critic_inside = action_rows[:, :horizon_length], inside[:, :horizon_length]
    terminals = rewards.terminals[critic_rows] & critic_inside
    ended = np.logical_or.accumulate(terminals, axis=1) | rewards.after_terminal[rows][:, None]
    has_terminal = terminals.any(axis=1)
    next_recorded = rows + horizon_length <= last
    usable = (has_terminal | next_recorded) & ~rewards.after_terminal[rows]
    return Windows(
        rows=rows,
        next_rows=np.minimum(rows + horizon_length, last),
        action_rows=action_rows,
        valid=inside.astype(np.float32),
        rewards=np.where(critic_inside, rewards.rewards[critic_rows], np.float32(0)),
        masks=1 - ended.astype(np.float32),
        terminals=terminals.astype(np.float32),
        next_terminal=has_terminal.astype(np.float32),
        sequence_mask=usable.astype(np.float32),
    )


class WindowSampler:
    """Draws windows from (seed, step) alone.

    Nothing is remembered between steps, so a run resumes at any step with the batches it would have had,
    whoever draws them and in whatever order. Every process draws the same global batch and keeps its part.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        seed: int,
        stream: int = 0,
        horizon_length: int,
        sequence_ratio: float,
        episodes: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Windows of the episodes at positions `episodes` (all of them by default) with these lengths.

        `sequence_ratio` is the share of each batch whose H steps lie inside their episode; the others
        reach past its end. Within either kind every starting step is equally likely. Samplers of one seed
        draw independently of each other where their `stream` differs.
        """
        self.episodes = np.arange(len(lengths)) if episodes is None else np.asarray(episodes, np.int64)
        if len(self.episodes) == 0:
            raise ValueError("there are no episodes to draw windows from")
        if not 0 <= sequence_ratio <= 1:
            raise ValueError(f"sequence_ratio must be between 0 and 1, found {sequence_ratio}")
        lengths = np.asarray(lengths, np.int64)[self.episodes]
        inside = np.maximum(lengths - horizon_length + 1, 0)  # starts per episode: 0..L-H
        self._inside_ends = np.cumsum(inside)
        self._crossing_ends = np.cumsum(lengths - inside)
        self._inside = inside
        self._ratio = sequence_ratio
        if self.num_inside == 0 and sequence_ratio > 0:
            raise ValueError(
                f"no episode has horizon_length={horizon_length} steps (the longest has {lengths.max()}): "
                "choose a shorter horizon, or sequence_ratio=0"
            )
        if self.num_crossing == 0:  # chunks of one step never reach past an end
            self._ratio = 1.0
        self._key = np.array([seed, stream], np.uint64)

    @property
    def num_inside(self) -> int:
        """Starting steps whose H steps lie inside their episode."""
        return int(self._inside_ends[-1])

    @property
    def num_crossing(self) -> int:
        """Starting steps whose H steps reach past the end of their episode."""
        return int(self._crossing_ends[-1])

    def sample(
        self, step: int, batch_size: int, *, process_index: int = 0, process_count: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """(episode positions, steps t) of this process's part of the batch of a training step."""
        draws = np.random.Philox(key=self._key, counter=[0, step, 0, 0]).random_raw(batch_size)
        # Both kinds are spread evenly, so that every shard and micro-batch gets its share.
        quota = np.floor(np.arange(batch_size + 1) * self._ratio + 0.5)
        is_inside = np.diff(quota) > 0
        size = batch_size // process_count
        mine = slice(process_index * size, (process_index + 1) * size)
        draws, is_inside = draws[mine], is_inside[mine]

        episodes, steps = np.empty(size, np.int64), np.empty(size, np.int64)
        for chosen, ends, first_step in (
            (is_inside, self._inside_ends, np.zeros_like(self._inside)),
            (~is_inside, self._crossing_ends, self._inside),
        ):
            if not chosen.any():
                continue
            start = (draws[chosen] % np.uint64(ends[-1])).astype(np.int64)
            position = np.searchsorted(ends, start, side="right")
            before = np.concatenate([[0], ends[:-1]])[position]
            episodes[chosen] = self.episodes[position]
            steps[chosen] = start - before + first_step[position]
        return episodes, steps
