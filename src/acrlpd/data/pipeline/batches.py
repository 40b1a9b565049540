"""Windows of episodes, and the batches that are made of them.

A window starts at step t of an episode of L steps. Its critic part is the H steps t..t+H-1, its policy part the T
actions t..t+T-1, and its next observation is the observation at t+H. A batch gathers the columns and frames of its
windows and sends them through the transforms.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.data.pipeline.prefetch import BufferPool
from acrlpd.data.pipeline.returns import StepReturns, compute_returns, rows_ahead
from acrlpd.data.pipeline.sampling import WindowSampler
from acrlpd.data.pipeline.transforms import to_observation
from acrlpd.data.sources.source import NOISE_COLUMN
from acrlpd.models.observation import Array, Observation


class RowRewards(Protocol):
    """What the rows of a table say about rewards: `StepRewards` on the host, a `RowTable` on the devices."""

    @property
    def rewards(self) -> Array: ...  # float32 [N]
    @property
    def terminals(self) -> Array: ...  # bool [N]
    @property
    def after_terminal(self) -> Array: ...  # bool [N]
    @property
    def leads_to_success(self) -> Array: ...  # bool [N]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of the column table, and the fields of `acrlpd.batch.Batch` that follow from them alone."""

    next_rows: Array  # int [B] of step t + H, or of the episode's last step
    action_rows: Array  # int [B, T]; past the end the last step repeats
    # valid, rewards, masks, terminals, next_terminal, sequence_mask and leads_to_success; float32
    fields: dict[str, Array]


def make_windows(
    rows: Array, last: Array, table: RowRewards, horizon_length: int, action_horizon: int, xp: ModuleType = np
) -> Windows:
    """The windows that start at `rows` of episodes whose last rows are `last`, [B] each, as index arithmetic.

    The critic may learn from a window if its target can be known: the episode ends with a terminal within the H steps,
    or the observation at t+H was recorded. A recording that stops without a terminal gives neither near its end. Steps
    that were recorded after the terminal are not part of the task any more. `xp` is numpy, or jax.numpy on the devices.
    """
    ahead, inside = rows_ahead(rows, last, max(action_horizon, horizon_length), xp)
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
        "leads_to_success": table.leads_to_success[rows],
    }
    return Windows(
        next_rows=next_rows,
        action_rows=ahead[:, :action_horizon],
        fields={name: values.astype(np.float32) for name, values in fields.items()},
    )


class BatchBuilder:
    """Makes host batches of windows of one dataset. Safe to use from several threads at once."""

    def __init__(self, dataset: Dataset, rl_config: RLTrainConfig) -> None:
        self.dataset = dataset
        self.buffers = BufferPool()
        self.horizons = (rl_config.qchunking.horizon_length, rl_config.model.action_horizon)
        self._repack = rl_config.data.repack
        self._noise_dim = rl_config.noise_dim
        self._transform = dataset.transforms.training_inputs(dataset.norm_stats)
        self._episode_ids = np.array(dataset.source.indices, np.int32)
        prompts = dataset.table.prompts if dataset.prompts is None else dataset.prompts
        # Numbers that follow from the text alone, so that equal prompts of dataset and replay are one task.
        self._task_ids = np.array([zlib.crc32(str(prompt).encode()) for prompt in prompts], np.uint32).view(np.int32)
        self.returns: StepReturns | None = None
        if rl_config.labels_prompts:
            table = dataset.table
            self.returns = compute_returns(table, dataset.rewards, self.task_ids(np.arange(table.num_rows)))

    @property
    def offsets(self) -> np.ndarray:
        """Rows at which the episodes begin, and the end of the last episode."""
        return self.dataset.table.offsets

    @property
    def steps_to_success(self) -> np.ndarray:
        """The number of steps at the beginning of each episode that lead to a success, int [episodes]."""
        return np.add.reduceat(self.dataset.rewards.leads_to_success, self.offsets[:-1], dtype=np.int64)

    def task_ids(self, rows: np.ndarray) -> np.ndarray:
        """`task_id` of a batch for the windows that start at `rows`."""
        return self._task_ids[self.dataset.table.prompt_index[rows]]

    def noise(self, rows: np.ndarray) -> np.ndarray | None:
        """`noise` of a batch for the windows that start at `rows`; 0 for data that was not played by the policy."""
        if self._noise_dim is None:
            return None
        recorded = self.dataset.table.columns.get(NOISE_COLUMN)
        return np.zeros((len(rows), self._noise_dim), np.float32) if recorded is None else recorded[rows]

    def build(self, episodes: np.ndarray, steps: np.ndarray, importance: np.ndarray | None = None) -> Batch:
        """The batch of windows that start at `steps` of the episodes at positions `episodes`.

        Without `importance`, the windows are taken to be drawn as they come in the data. Observations at t and at t + H
        go through the transforms together, as one batch of twice the size.
        """
        offsets, size = self.offsets, len(steps)
        first_rows, last_rows = offsets[episodes] + steps, offsets[episodes + 1] - 1
        windows = make_windows(first_rows, last_rows, self.dataset.rewards, *self.horizons)
        rows = np.concatenate([first_rows, windows.next_rows])
        action_rows = np.concatenate([windows.action_rows, windows.action_rows])
        frames = self.read_frames(np.concatenate([episodes, episodes]), rows)
        observations, actions = self.read(rows, action_rows, frames)
        return Batch(
            observations=jax.tree.map(lambda x: x[:size], observations),
            next_observations=jax.tree.map(lambda x: x[size:], observations),
            actions=actions[:size],
            **windows.fields,
            importance=np.ones(size, np.float32) if importance is None else importance,
            task_id=self.task_ids(first_rows),
            episode_id=self._episode_ids[episodes],
            step_id=steps.astype(np.int32),
            noise=self.noise(first_rows),
            returns=None if self.returns is None else self.returns.of_windows(first_rows, last_rows, self.horizons),
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
        return to_observation(data), data["actions"].astype(np.float32)

    def read_frames(self, episodes: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Camera -> uint8 [n, h, w, 3] for the cameras that the policy is given, at `rows` [n] of `episodes` [n]."""
        frames = self.dataset.frames
        if frames is None:
            return {}
        steps = rows - self.dataset.table.offsets[episodes]
        images = {}
        for camera in frames.cameras:
            images[camera] = self.buffers.take((len(rows), frames.height, frames.width, 3))
            frames.read_into(camera, episodes, steps, images[camera])
        return images


class JoinedBuilder:
    """Makes batches of windows of several datasets, whose episodes are numbered one after the other."""

    def __init__(self, builders: Sequence[BatchBuilder]) -> None:
        self._builders = builders
        rows = np.cumsum([0, *(builder.offsets[-1] for builder in builders)])
        begins = [first + builder.offsets[:-1] for first, builder in zip(rows, builders, strict=False)]
        self.offsets = np.concatenate([*begins, rows[-1:]])
        self.steps_to_success = np.concatenate([builder.steps_to_success for builder in builders])
        self._first_episodes = np.cumsum([0, *(len(builder.offsets) - 1 for builder in builders)])

    def build(self, episodes: np.ndarray, steps: np.ndarray, importance: np.ndarray) -> Batch:
        owner = np.searchsorted(self._first_episodes, episodes, side="right") - 1
        places = [np.flatnonzero(owner == i) for i in range(len(self._builders))]
        batches = [
            builder.build(episodes[place] - first, steps[place], importance[place])
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
