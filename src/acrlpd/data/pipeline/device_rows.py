"""The columns of dataset and replay on the devices, from which the train step gathers its windows.

A small policy learns from a batch in less time than the host needs to make one. What a policy without cameras sees fits
on the devices: one row per step, already transformed. A batch is then only the row numbers of its windows. The host
draws these numbers as it always does, and the windows have the same values as the host's batches.
"""

import functools
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from acrlpd.batch import Batch
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.data.pipeline.batches import BatchBuilder, Part, interleave, make_windows
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.data.pipeline.returns import StepReturns
from acrlpd.models.observation import Array, Observation
from acrlpd.units import format_bytes

logger = logging.getLogger(__name__)

# The largest number of updates in a call. Row numbers are small, so this costs no memory. A call of a quarter of a
# second has as many updates if an update takes half a millisecond.
ROWS_CAPACITY = 512
# The share of a device's memory that the rows may take. `acrlpd plan` does not count them.
_MEMORY_SHARE = 0.1
# Rows that are written to the devices at once when the replay grows: one compiled program for episodes of any length.
_CHUNK = 4096
# A table has a multiple of this many rows. So runs on somewhat more or less data, such as a run that will act and a
# baseline that will not, have tables of one size, and the train step is compiled once for all of them.
_BLOCK = 32_768
# Windows that are compared with those of the host before the rows are used.
_CHECKED_WINDOWS = 64


@flax.struct.dataclass
class RowTable:
    """One row for each step of the dataset, then of the replay, then free rows into which the replay grows."""

    observation: Observation  # [N, ...], transformed as in a batch; without images
    actions: Array  # float32 [N, a], transformed
    rewards: Array  # float32 [N]
    terminals: Array  # bool [N]
    after_terminal: Array  # bool [N]
    leads_to_success: Array  # bool [N]
    last_row: Array  # int32 [N], of the row's episode
    task_id: Array  # int32 [N]
    episode_id: Array  # int32 [N]
    step_id: Array  # int32 [N]
    noise: Array | None  # float32 [N, n]; None unless critics judge noise
    returns: StepReturns | None  # None: the improvement labels no prompts


@flax.struct.dataclass
class RowFeed:
    """A feed of row numbers; the windows are gathered on the devices."""

    table: RowTable
    rows: jax.Array  # int32 [capacity, B], of the first step of each window
    importance: jax.Array  # float32 [capacity, B]
    horizons: tuple[int, int] = flax.struct.field(pytree_node=False)  # (horizon_length, action_horizon)

    @property
    def capacity(self) -> int:
        return self.rows.shape[0]

    def batch(self, index: jax.Array) -> Batch:
        table, returns, rows = self.table, self.table.returns, self.rows[index]
        windows = make_windows(rows, table.last_row[rows], table, *self.horizons, xp=jnp)
        return Batch(
            observations=jax.tree.map(lambda x: x[rows], table.observation),
            next_observations=jax.tree.map(lambda x: x[windows.next_rows], table.observation),
            actions=table.actions[windows.action_rows],
            **windows.fields,
            importance=self.importance[index],
            task_id=table.task_id[rows],
            episode_id=table.episode_id[rows],
            step_id=table.step_id[rows],
            noise=None if table.noise is None else table.noise[rows],
            returns=None if returns is None else returns.of_windows(rows, table.last_row[rows], self.horizons, jnp),
        )


class DeviceRows:
    """The table of a run on its devices, each of which keeps its share of the rows."""

    def __init__(
        self,
        rows: RowTable,
        horizons: tuple[int, int],
        sharding: NamedSharding,
        *,
        spare_rows: int,
        like: "DeviceRows | None",
    ) -> None:
        """`rows` are those of the dataset, on the host; `sharding` is that of a batch.

        `spare_rows` is the number of rows that the replay is expected to have in the end. Equal columns of another run
        on these devices, `like`, are used in place of own columns; such rows must not grow.
        """
        self._horizons = horizons
        self._sharding = sharding
        self._num_rows = self._num_prior = len(rows.rewards)
        self._table = self._place(rows, self._num_rows + spare_rows)
        if like is not None:
            self._table = jax.tree.map(_choose, self._table, like._table)

    def feed(self, rows: np.ndarray, importance: np.ndarray) -> RowFeed:
        """The feed of updates whose windows start at `rows` [updates, b], with their importance; b of this process."""
        places = NamedSharding(self._sharding.mesh, PartitionSpec(None, *self._sharding.spec))

        def place(x: np.ndarray, dtype: type) -> jax.Array:
            return jax.make_array_from_process_local_data(places, _pad(x, ROWS_CAPACITY).astype(dtype))

        return RowFeed(self._table, place(rows, np.int32), place(importance, np.float32), self._horizons)

    def extend(self, replay: BatchBuilder) -> None:
        """Adds the rows of the replay that are new behind those of the dataset."""
        seen, total = self._num_rows - self._num_prior, replay.dataset.table.num_rows
        new = read_rows(replay, first=seen, rows_before=self._num_prior)
        if self._num_prior + total > self._capacity:
            logger.info("the replay has outgrown its place on the devices: the train step is compiled once more")
            old = jax.tree.map(lambda x: np.asarray(x)[: self._num_rows], self._table)
            self._table = self._place(old, self._num_prior + 2 * total)
        for start in range(0, total - seen, _CHUNK):
            chunk = jax.tree.map(lambda x, start=start: _pad(x[start : start + _CHUNK], _CHUNK), new)
            rows = np.arange(_CHUNK) + self._num_rows + start
            rows[total - seen - start :] = self._capacity  # of the padding: outside of the table, so left out
            self._table = _write(self._table, rows.astype(np.int32), chunk)
        self._num_rows = self._num_prior + total

    @property
    def _capacity(self) -> int:
        return self._table.rewards.shape[0]

    def _place(self, rows: RowTable, wanted: int) -> RowTable:
        """`rows` on the devices, followed by free rows."""
        capacity = _whole_blocks(wanted, self._sharding)

        def place(x: np.ndarray) -> jax.Array:
            whole = _pad(x, capacity)
            return jax.make_array_from_callback(whole.shape, self._sharding, lambda index: whole[index])

        return jax.tree.map(place, rows)


_RowsAndImportance = tuple[np.ndarray, np.ndarray]  # of windows, [updates, b] each


class RowDraws:
    """Row numbers and importance of windows of steps from `first_step` on; a thread draws the next call's ahead."""

    def __init__(
        self,
        parts: Sequence[Part],
        process: tuple[int, int],
        *,
        first_step: int,
        num_workers: int,
    ) -> None:
        """The parts lie one after the other in the table on the devices. Without workers nothing is ahead."""
        self._step: int | None = first_step
        first_rows = np.cumsum([0, *(builder.offsets[-1] for builder, _, _ in parts)])
        self._parts = [
            (first + builder.offsets, size, sampler)
            for (builder, size, sampler), first in zip(parts, first_rows, strict=False)
            if size
        ]
        self._process = process
        self._thread = ThreadPoolExecutor(1, "acrlpd-data") if num_workers else None
        self._ahead: Future[_RowsAndImportance] | None = None  # from `step` on

    def take(self, num_steps: int) -> _RowsAndImportance:
        """Row numbers and importance [num_steps, b] of the next steps."""
        first = self.step
        rows, importance = self._draw(first, num_steps, self._ahead.result() if self._ahead is not None else None)
        self._step = first + num_steps
        if self._thread is not None:  # The next call will want about as many as this one.
            left = rows[num_steps:], importance[num_steps:]
            self._ahead = self._thread.submit(self._draw, self._step, num_steps, left)
        return rows[:num_steps], importance[:num_steps]

    def _draw(self, first: int, num_steps: int, drawn: _RowsAndImportance | None) -> _RowsAndImportance:
        """The rows of at least `num_steps` steps from `first` on, which begin with those that were drawn already."""
        num_drawn = 0 if drawn is None else len(drawn[0])
        if drawn is not None and num_drawn >= num_steps:
            return drawn
        parts = []
        for offsets, size, sampler in self._parts:
            steps_ahead = range(first + num_drawn, first + num_steps)
            episodes, steps, importance = sampler.sample_many(steps_ahead, size, *self._process)
            parts.append(((offsets[episodes] + steps).T, importance.T))
        rows, importance = (x.T for x in interleave(parts))
        if drawn is None:
            return rows, importance
        return np.concatenate([drawn[0], rows]), np.concatenate([drawn[1], importance])

    @property
    def step(self) -> int:
        """The step that `take` begins with."""
        if self._step is None:
            raise RuntimeError("the data loader was closed")
        return self._step

    def close(self) -> None:
        self._step = None
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def _choose(own: jax.Array, others: jax.Array) -> jax.Array:
    """The other array where both are equal, so that the devices keep one of them."""
    return others if own.shape == others.shape and bool(jnp.array_equal(own, others)) else own


@functools.partial(jax.jit, donate_argnums=0)
def _write(table: RowTable, rows: jax.Array, new: RowTable) -> RowTable:
    return jax.tree.map(lambda old, values: old.at[rows].set(values, mode="drop"), table, new)


def _whole_blocks(rows: int, sharding: NamedSharding) -> int:
    """The size of a table for at least `rows` rows, of which each device keeps the same number."""
    block = math.lcm(_BLOCK, sharding.mesh.size)
    return math.ceil(rows / block) * block


def _pad(x: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def read_rows(builder: BatchBuilder, *, first: int = 0, rows_before: int = 0) -> RowTable:
    """The rows of a dataset from row `first` on, on the host.

    `rows_before` is the number of rows of other data that come before row 0 in the whole table.
    """
    dataset, offsets = builder.dataset, builder.offsets
    rows = np.arange(first, dataset.table.num_rows)
    episodes = dataset.table.episodes_of(rows)
    observation, actions = builder.read(rows, rows[:, None], {})  # chunks of one action
    return RowTable(
        observation=observation,
        actions=actions[:, 0],
        rewards=dataset.rewards.rewards[rows].astype(np.float32),
        terminals=dataset.rewards.terminals[rows],
        after_terminal=dataset.rewards.after_terminal[rows],
        leads_to_success=dataset.rewards.leads_to_success[rows],
        last_row=(rows_before + offsets[episodes + 1] - 1).astype(np.int32),
        task_id=builder.task_ids(rows),
        episode_id=np.array(dataset.source.indices, np.int32)[episodes],
        step_id=(rows - offsets[episodes]).astype(np.int32),
        noise=builder.noise(rows),
        returns=jax.tree.map(lambda x: x[rows], builder.returns),
    )


def create_device_rows(
    builder: BatchBuilder,
    rl_config: RLTrainConfig,
    sharding: NamedSharding,
    *,
    num_runs: int,
    like: DeviceRows | None,
) -> DeviceRows | None:
    """The rows of a run on its devices; None if the config does not want them there, or they cannot be there.

    `num_runs` runs train on these devices together; `like` has the rows of one of them. Runs that act online get rows
    of their own from the start, because each has its own replay: the train step stays the same in both phases.
    """
    wish = rl_config.data.on_device
    if wish == "never":
        return None
    problem = _what_prevents_rows(builder.dataset, rl_config, sharding, num_runs)
    if problem is None:
        rows = read_rows(builder)
        if _are_windows_of(rows, builder):
            spare_rows = expected_replay_rows(rl_config)
            like = None if spare_rows else like
            return DeviceRows(rows, builder.horizons, sharding, spare_rows=spare_rows, like=like)
        problem = "a chunk of actions is not transformed action by action, as with data.use_delta_joint_actions=true"
    if wish == "always":
        raise ConfigError(f"data.on_device=always: {problem}; use data.on_device=auto")
    logger.debug("the data stays on the host: %s", problem)
    return None


def expected_replay_rows(rl_config: RLTrainConfig) -> int:
    """Environment steps that the online phase needs, and a quarter more, because rounds end with whole episodes.

    A short phase gets at least one chunk of rows: its last round may be longer than all that it needs.
    """
    online, steps = rl_config.online, rl_config.training.online_steps
    needed = online.start_steps + steps / online.update_to_data_ratio
    return max(_CHUNK, math.ceil(1.25 * needed)) if steps else 0


def _what_prevents_rows(
    dataset: Dataset, rl_config: RLTrainConfig, sharding: NamedSharding, num_runs: int
) -> str | None:
    """Why the rows cannot lie on the devices, as far as their size and the policy tell; None if they can."""
    if dataset.frames is not None:
        return "the policy sees images, which the host reads"
    if rl_config.model.discrete_state_input and dataset.prompts is not None:
        return "the state is written into the prompt, which the host does"
    total = _whole_blocks(dataset.table.num_rows + expected_replay_rows(rl_config), sharding)
    needed = num_runs * total * row_bytes(rl_config) // sharding.mesh.size
    limit = int(_MEMORY_SHARE * _device_memory(sharding))
    if needed > limit:
        return (
            f"{num_runs * total:,} rows need {format_bytes(needed)} on each device, more than the "
            f"{format_bytes(limit)} that are set aside for data ({_MEMORY_SHARE:.0%} of its memory)"
        )
    return None


def row_bytes(rl_config: RLTrainConfig) -> int:
    """Bytes of one row: observation, action, reward, last row, task, episode, step, three flags, noise and returns."""
    observation, _ = rl_config.model.inputs_spec(1, labelled_prompts=rl_config.labels_prompts)
    seen = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(observation))
    returns = 2 * 4 + 3 if rl_config.labels_prompts else 0  # two numbers and three flags, as in `StepReturns`
    return seen + 4 * (rl_config.model.action_dim + 5 + (rl_config.noise_dim or 0)) + 3 + returns


def _device_memory(sharding: NamedSharding) -> int:
    """Bytes of the smallest device of this process. The memory of a CPU is that of the machine."""
    devices = sharding.mesh.local_devices
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return min(host if limit is None else limit for limit in limits)


def _are_windows_of(table: RowTable, builder: BatchBuilder) -> bool:
    """Whether windows of transformed rows are transformed windows, to the last bit, for a sample of windows.

    Relative actions depend on the first state of their chunk, and a user's own robot may do anything.
    """
    rows = np.unique(np.linspace(0, len(table.rewards) - 1, _CHECKED_WINDOWS).astype(np.int64))
    episodes = builder.dataset.table.episodes_of(rows)
    expected = builder.build(episodes, rows - builder.offsets[episodes])
    windows = make_windows(rows, table.last_row[rows], table, *builder.horizons)
    pairs = (
        (expected.observations, jax.tree.map(lambda x: x[rows], table.observation)),
        (expected.next_observations, jax.tree.map(lambda x: x[windows.next_rows], table.observation)),
        (expected.actions, table.actions[windows.action_rows]),
    )
    return jax.tree.all(jax.tree.map(np.array_equal, *zip(*pairs, strict=True)))
