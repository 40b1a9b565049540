"""Random windows of episodes, and the batches that are made of them.

A window starts at step t of an episode of L steps. Its critic part is the H steps t..t+H-1, its policy part the T
actions t..t+T-1, and its next observation is the observation at t+H. A batch gathers the columns and frames of its
windows and sends them through the transforms.
"""

import dataclasses
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.models.observation import Array, Observation

# JAX uses an aligned host buffer on a CPU without a copy.
_ALIGNMENT = 64


class RowRewards(Protocol):
    """What the rows of a table say about rewards: `StepRewards` on the host, a `RowTable` on the devices."""

    @property
    def rewards(self) -> Array: ...  # float32 [N]
    @property
    def terminals(self) -> Array: ...  # bool [N]
    @property
    def after_terminal(self) -> Array: ...  # bool [N]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of the column table, and the fields of `acrlpd.batch.Batch` that follow from them alone."""

    next_rows: Array  # int [B] of step t + H, or of the episode's last step
    action_rows: Array  # int [B, T]; past the end the last step repeats
    fields: dict[str, Array]  # valid, rewards, masks, terminals, next_terminal and sequence_mask; float32


def make_windows(
    rows: Array, last: Array, table: RowRewards, horizon_length: int, action_horizon: int, xp: ModuleType = np
) -> Windows:
    """The windows that start at `rows` of episodes whose last rows are `last`, [B] each, as index arithmetic.

    The critic may learn from a window if its target can be known: the episode ends with a terminal within the H steps,
    or the observation at t+H was recorded. A recording that stops without a terminal gives neither near its end. Steps
    that were recorded after the terminal are not part of the task any more. `xp` is numpy, or jax.numpy on the devices.
    """
    ahead = rows[:, None] + xp.arange(max(action_horizon, horizon_length))
    inside = ahead <= last[:, None]
    ahead = xp.minimum(ahead, last[:, None])
    critic_rows, critic_inside = ahead[:, :horizon_length], inside[:, :horizon_length]
    terminals = table.terminals[critic_rows] & critic_inside
    after_terminal = table.after_terminal[rows]
    ended = (xp.cumsum(terminals, axis=1) > 0) | after_terminal[:, None]
    has_terminal = xp.any(terminals, axis=1)
    next_rows = xp.minimum(rows + horizon_length, last)
    next_recorded = rows + horizon_length <= last
    ends_with_terminal = table.after_terminal[next_rows] | (table.terminals[last] & ~next_recorded)
    fields = {
        "valid": inside[:, :action_horizon],
        "rewards": xp.where(critic_inside, table.rewards[critic_rows], 0),
        "masks": ~ended,
        "terminals": terminals,
        "next_terminal": has_terminal,
        "sequence_mask": (ends_with_terminal | next_recorded) & ~after_terminal,
    }
    return Windows(
        next_rows=next_rows,
        action_rows=ahead[:, :action_horizon],
        fields={name: values.astype(np.float32) for name, values in fields.items()},
    )


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
        episodes: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Windows of the episodes at positions `episodes` (all of them by default) with these lengths.

        `sequence_ratio` is the share of each batch whose H steps lie inside their episode; the other windows reach
        past the end of theirs. Within either kind every starting step is equally likely. With None, every starting step
        of all windows is equally likely. Samplers of one seed draw independently of each other if their `stream`
        differs.
        """
        self.episodes = np.arange(len(lengths)) if episodes is None else np.asarray(episodes, np.int64)
        if len(self.episodes) == 0:
            raise ValueError("there are no episodes to draw windows from")
        lengths = np.asarray(lengths, np.int64)[self.episodes]
        inside = np.maximum(lengths - horizon_length + 1, 0)  # starts per episode: 0..L-H
        if sequence_ratio is None:
            inside = lengths  # All starts are of one kind.
        self._inside_ends = np.cumsum(inside)
        self._crossing_ends = np.cumsum(lengths - inside)
        self._inside = inside
        # A chunk of one step never reaches past the end of an episode.
        self._ratio = 1.0 if sequence_ratio is None or not self._crossing_ends[-1] else sequence_ratio
        if max(lengths) < horizon_length and sequence_ratio != 0:
            raise ValueError(
                f"no episode has horizon_length={horizon_length} steps (the longest has {lengths.max()}): "
                "choose a shorter horizon, or sequence_ratio=0"
            )
        self._key = np.array([seed, stream], np.uint64)

    def sample(
        self, step: int, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """(episode positions, steps t) [b] of this process's part of the batch of a training step."""
        episodes, steps = self.sample_many([step], batch_size, process_index, process_count)
        return episodes[0], steps[0]

    def sample_many(
        self, training_steps: Sequence[int], batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for the batches of several training steps, [n, b] each, in less time than one by one."""
        counters = [[0, step, 0, 0] for step in training_steps]
        draws = np.stack([np.random.Philox(key=self._key, counter=c).random_raw(batch_size) for c in counters])
        # Both kinds are spread evenly, so that every shard and micro-batch gets its share.
        quota = np.floor(np.arange(batch_size + 1) * self._ratio + 0.5)
        is_inside = np.diff(quota) > 0
        size = batch_size // process_count
        mine = slice(process_index * size, (process_index + 1) * size)
        draws, is_inside = draws[:, mine], is_inside[mine]

        episodes, steps = np.empty(draws.shape, np.int64), np.empty(draws.shape, np.int64)
        for chosen, ends, first_step in (
            (is_inside, self._inside_ends, np.zeros_like(self._inside)),
            (~is_inside, self._crossing_ends, self._inside),
        ):
            if not chosen.any():
                continue
            start = (draws[:, chosen] % np.uint64(ends[-1])).astype(np.int64)
            position = np.searchsorted(ends, start, side="right")
            before = np.concatenate([[0], ends[:-1]])[position]
            episodes[:, chosen] = self.episodes[position]
            steps[:, chosen] = start - before + first_step[position]
        return episodes, steps


class BatchBuilder:
    """Makes host batches of windows of one dataset. Safe to use from several threads at once."""

    def __init__(self, dataset: Dataset, rl_config: RLTrainConfig) -> None:
        self.dataset = dataset
        self.buffers = BufferPool()
        self.horizons = (rl_config.qchunking.horizon_length, rl_config.model.action_horizon)
        self._repack = rl_config.data.repack
        self._transform = dataset.transforms.training_inputs(dataset.norm_stats)
        self._episode_ids = np.array(dataset.source.indices, np.int32)

    @property
    def offsets(self) -> np.ndarray:
        """Rows at which the episodes begin, and the end of the last episode."""
        return self.dataset.table.offsets

    def build(self, episodes: np.ndarray, steps: np.ndarray) -> Batch:
        """The batch of windows that start at `steps` of the episodes at positions `episodes`.

        Observations at t and at t + H go through the transforms together, as one batch of twice the size.
        """
        offsets, size = self.offsets, len(steps)
        first_rows, last_rows = offsets[episodes] + steps, offsets[episodes + 1] - 1
        windows = make_windows(first_rows, last_rows, self.dataset.rewards, *self.horizons)
        rows = np.concatenate([first_rows, windows.next_rows])
        action_rows = np.concatenate([windows.action_rows, windows.action_rows])
        observations, actions = self.read(rows, action_rows, self._read_frames(episodes, rows))
        return Batch(
            observations=jax.tree.map(lambda x: x[:size], observations),
            next_observations=jax.tree.map(lambda x: x[size:], observations),
            actions=actions[:size],
            **windows.fields,
            episode_id=self._episode_ids[episodes],
            step_id=steps.astype(np.int32),
        )

    def read(
        self, rows: np.ndarray, action_rows: np.ndarray, images: Mapping[str, np.ndarray]
    ) -> tuple[Observation, np.ndarray]:
        """What the policy sees at `rows` [n], and chunks of the actions at `action_rows` [n, t]: float32 [n, t, a]."""
        table = self.dataset.table
        data: dict[str, Any] = {name: table.columns[name][rows] for name in self._repack.state}
        data |= {name: table.columns[name][action_rows] for name in self._repack.actions}
        data |= images
        if self.dataset.prompts is not None:
            data["prompt"] = self.dataset.prompts[table.prompt_index[rows]]
        data = self._transform(data)
        observation = Observation(
            images=data.get("image", {}),
            image_masks=data.get("image_mask", {}),
            state=data["state"].astype(np.float32),
            tokenized_prompt=data.get("tokenized_prompt"),
            tokenized_prompt_mask=data.get("tokenized_prompt_mask"),
        )
        return observation, data["actions"].astype(np.float32)

    def _read_frames(self, episodes: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Camera -> uint8 [2B, h, w, 3] for the cameras that the policy is given."""
        frames = self.dataset.frames
        if frames is None:
            return {}
        episodes = np.concatenate([episodes, episodes])
        steps = rows - self.dataset.table.offsets[episodes]
        images = {}
        for camera in frames.cameras:
            images[camera] = self.buffers.take((len(rows), frames.height, frames.width, 3))
            frames.read_into(camera, episodes, steps, images[camera])
        return images


class BufferPool:
    """Image buffers that go round: filled by the loader, read by the device, filled again. Recycled by shape.

    A batch of images is hundreds of megabytes, and touching that much fresh memory costs as much as reading the frames.
    A caller cannot know when a buffer is free again: a transfer may still run, and on a CPU the device array *is* the
    buffer. So a buffer comes back when the last array that looks at it dies.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[np.ndarray]] = {}
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array of this shape with undefined content; it goes back when the array and its views are gone."""
        with self._lock:
            free = self._free.setdefault(shape, [])
            buffer = free.pop() if free else None
            if buffer is None:
                self.allocated_bytes += math.prod(shape)
                raw = np.empty(math.prod(shape) + _ALIGNMENT, np.uint8)
                start = -raw.ctypes.data % _ALIGNMENT
                buffer = raw[start : start + math.prod(shape)].reshape(shape)
        lease = _Lease(buffer)
        # No lock: a loan may end at any moment, also while this thread holds the lock. Appending is atomic.
        weakref.finalize(lease, free.append, buffer).atexit = False
        return np.asarray(lease)


class _Lease:
    """All views of a lent buffer refer to the lease, so the end of the lease is the end of the loan."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._buffer.__array_interface__


class JoinedBuilder:
    """Makes batches of windows of several datasets, whose episodes are numbered one after the other."""

    def __init__(self, builders: Sequence[BatchBuilder]) -> None:
        self._builders = builders
        rows = np.cumsum([0, *(builder.offsets[-1] for builder in builders)])
        begins = [first + builder.offsets[:-1] for first, builder in zip(rows, builders, strict=False)]
        self.offsets = np.concatenate([*begins, rows[-1:]])
        self._first_episodes = np.cumsum([0, *(len(builder.offsets) - 1 for builder in builders)])

    def build(self, episodes: np.ndarray, steps: np.ndarray) -> Batch:
        owner = np.searchsorted(self._first_episodes, episodes, side="right") - 1
        places = [np.flatnonzero(owner == i) for i in range(len(self._builders))]
        batches = [
            builder.build(episodes[place] - first, steps[place])
            for builder, place, first in zip(self._builders, places, self._first_episodes, strict=False)
            if len(place)
        ]
        order = np.argsort(np.concatenate(places))
        return jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *batches)


# What a part of each batch is made of: its builder, its number of windows over all processes, and its sampler.
Part = tuple[BatchBuilder | JoinedBuilder, int, WindowSampler]


def interleave(parts: Sequence[Any]) -> Any:
    """Joins batches (or other arrays) into one, each spread evenly over the result: every shard gets its share."""
    if len(parts) == 1:
        return parts[0]
    sizes = [len(jax.tree.leaves(part)[0]) for part in parts]
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    order = np.argsort(places, kind="stable")
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *parts)
