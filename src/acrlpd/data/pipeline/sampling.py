"""Which windows a batch has: drawn from the seed and the step alone."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class DrawnWindows(NamedTuple):
    """Windows by their first steps, [b] each, or [n, b] for the batches of n training steps."""

    episodes: np.ndarray  # int64, positions of the episodes
    steps: np.ndarray  # int64, t
    importance: np.ndarray  # float32, as in `acrlpd.batch.Batch`


class WindowSampler:
    """Draws windows from (seed, step) alone.

    The sampler remembers nothing between steps, so a run resumes at any step with the batches it would have had, and
    threads may draw steps in any order. Every process draws the same global batch and keeps its part.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        seed: int,
        stream: int = 0,
        horizon_length: int,
        sequence_ratio: float | None,
        success_ratio: float | None = None,
        steps_to_success: np.ndarray | None = None,
        episodes: Sequence[int] | np.ndarray | None = None,
        stride: int = 1,
    ) -> None:
        """Windows of the episodes at positions `episodes` (all of them by default) with these lengths.

        `sequence_ratio` is the share of each batch whose H steps lie inside their episode; the other windows reach
        past the end of theirs. Within either kind every starting step is equally likely. With None, every starting step
        of all windows is equally likely. `success_ratio` is the share of each kind that is drawn from the windows that
        lead to a success, which begin in the first `steps_to_success` [episodes] steps of their episodes; the rest is
        drawn from all windows. A kind in which no window leads to a success is drawn as if there were no such share.
        Samplers of one seed draw independently of each other if their `stream` differs. Windows start at multiples of
        `stride` alone, where an episode that was played in chunks of so many steps has its chunks.
        """
        self.episodes = np.arange(len(lengths)) if episodes is None else np.asarray(episodes, np.int64)
        if len(self.episodes) == 0:
            raise ValueError("there are no episodes to draw windows from")
        lengths = np.asarray(lengths, np.int64)[self.episodes]
        # Starts are counted in strides: of the steps 0..n-1, -(-n // stride) are starts.
        starts = -(-lengths // stride)
        inside = -(-np.maximum(lengths - horizon_length + 1, 0) // stride)  # of the steps 0..L-H
        if sequence_ratio is None:
            inside = starts  # All starts are of one kind.
        good = np.zeros_like(lengths)
        if success_ratio is not None and steps_to_success is not None:
            good = -(-np.asarray(steps_to_success, np.int64)[self.episodes] // stride)
        nothing = np.zeros_like(lengths)
        self._kinds = (
            _Kind(_Starts(nothing, inside), _Starts(nothing, np.minimum(good, inside))),
            _Kind(_Starts(inside, starts - inside), _Starts(inside, np.maximum(good - inside, 0))),
        )
        self._stride = stride
        self._success_ratio = 0.0 if success_ratio is None else success_ratio
        # A chunk of one step never reaches past the end of an episode.
        self._ratio = 1.0 if sequence_ratio is None or not self._kinds[1].all.total else sequence_ratio
        if max(lengths) < horizon_length and sequence_ratio != 0:
            raise ValueError(
                f"no episode has horizon_length={horizon_length} steps (the longest has {lengths.max()}): "
                "choose a shorter horizon, or sequence_ratio=0"
            )
        self._key = np.array([seed, stream], np.uint64)

    def sample(self, step: int, batch_size: int, process_index: int = 0, process_count: int = 1) -> DrawnWindows:
        """The windows [b] of this process's part of the batch of a training step."""
        drawn = self.sample_many([step], batch_size, process_index, process_count)
        return DrawnWindows(*(values[0] for values in drawn))

    def sample_many(
        self, training_steps: Sequence[int], batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> DrawnWindows:
        """The same for the batches of several training steps, [n, b] each, in less time than one by one."""
        counters = [[0, step, 0, 0] for step in training_steps]
        draws = np.stack([np.random.Philox(key=self._key, counter=c).random_raw(batch_size) for c in counters])
        position, steps = np.empty(draws.shape, np.int64), np.empty(draws.shape, np.int64)
        importance = np.ones(draws.shape, np.float32)
        is_inside = _spread(self._ratio, batch_size)
        for kind, slots in zip(self._kinds, (np.flatnonzero(is_inside), np.flatnonzero(~is_inside)), strict=True):
            if not len(slots):
                continue
            preferred = _spread(self._success_ratio if kind.to_success.total else 0.0, len(slots))
            if preferred.all():
                preferred[0] = False  # Windows that lead to no success must be possible, too.
            for starts, chosen in ((kind.all, slots[~preferred]), (kind.to_success, slots[preferred])):
                if len(chosen):
                    position[:, chosen], steps[:, chosen] = starts.find(draws[:, chosen])
            if preferred.any():
                importance[:, slots] = kind.importance(position[:, slots], steps[:, slots], preferred.mean())
        size = batch_size // process_count
        mine = slice(process_index * size, (process_index + 1) * size)
        return DrawnWindows(self.episodes[position[:, mine]], self._stride * steps[:, mine], importance[:, mine])


def _spread(share: float, size: int) -> np.ndarray:
    """bool [size], true for this share, evenly spread, so that every shard gets its share."""
    return np.diff(np.floor(np.arange(size + 1) * share + 0.5)) > 0


class _Starts:
    """`counts` starting steps of each episode, from the step `first` on; [episodes] each."""

    def __init__(self, first: np.ndarray, counts: np.ndarray) -> None:
        self._first, self._counts = first, counts
        self._ends = np.cumsum(counts)
        self.total = int(self._ends[-1])

    def find(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(episode, step) of the starts that random numbers uint64 [...] choose, each equally likely."""
        start = (draws % np.uint64(self.total)).astype(np.int64)
        position = np.searchsorted(self._ends, start, side="right")
        return position, start - (self._ends - self._counts)[position] + self._first[position]

    def contain(self, position: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Whether each (episode, step) is one of these starts."""
        ahead = steps - self._first[position]
        return (ahead >= 0) & (ahead < self._counts[position])


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The starts of all windows of one kind, and of those that lead to a success."""

    all: _Starts
    to_success: _Starts

    def importance(self, position: np.ndarray, steps: np.ndarray, share: float) -> np.ndarray:
        """How probable starts are if all are equally likely, divided by how probable they are in this mixture.

        In the mixture, `share` of the starts are drawn from those that lead to a success, and the rest from all.
        """
        preference = self.to_success.contain(position, steps) * (self.all.total / self.to_success.total)
        return 1 / ((1 - share) + share * preference)
