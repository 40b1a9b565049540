"""The data loader: batches of windows, prepared ahead by threads and put on the devices."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from acrlpd.batch import Batch, Feed, StackedBatches, first_batch
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.plan.flops import batch_spec
from acrlpd.data.pipeline.batches import BatchBuilder, JoinedBuilder, Part, interleave
from acrlpd.data.pipeline.dataset import Dataset, open_dataset
from acrlpd.data.pipeline.device_rows import ROWS_CAPACITY, RowDraws, create_device_rows
from acrlpd.data.pipeline.prefetch import Prefetcher
from acrlpd.data.pipeline.sampling import WindowSampler

logger = logging.getLogger(__name__)

# Batches that travel to the devices together have at most this size. If batches are larger, an update takes longer than
# the host needs for a call.
_TRANSFER_BYTES = 4 * 2**20
_MOST_BATCHES_PER_TRANSFER = 64


class DataLoader:
    """Endless batches of action-chunk transitions.

    The batch of a step depends on the seed, the step and the dataset alone (and on the size of the memory pool, if the
    config has one), not on threads, restarts or the number of processes. Each process gets its part of the global
    batch. With a `device_sharding` the parts form global arrays on the devices, without one they are numpy arrays.

    A train step that makes several updates gets their batches as one feed: row numbers where the data lies on the
    devices, otherwise batches that the host has made.
    """

    def __init__(
        self,
        dataset: Dataset,
        rl_config: RLTrainConfig,
        *,
        batch_size: int | None = None,
        device_sharding: NamedSharding | None = None,
        process_index: int | None = None,
        process_count: int | None = None,
        num_runs: int = 1,
        like: "DataLoader | None" = None,
        first_step: int = 0,
    ) -> None:
        """Batches of `batch_size` windows over all processes; None: as many as the config says.

        The part of each batch is that of this process, unless a process is named. `num_runs` runs train on the devices
        together; `like` is the loader of one of them. The first batch is that of the update after `first_step` updates.
        """
        batch_size = rl_config.batch_size if batch_size is None else batch_size
        process_index = jax.process_index() if process_index is None else process_index
        process_count = jax.process_count() if process_count is None else process_count
        if batch_size % process_count:
            raise ValueError(
                f"batch_size {batch_size} cannot be split over {process_count} processes; choose a multiple"
            )
        self.batch_size = batch_size
        self.dataset = dataset  # the prior data
        self._rl_config = rl_config
        prior = BatchBuilder(dataset, rl_config)
        # Where the windows come from, in the order of the rows on the devices; an online run has the replay as well.
        self._builders = [prior]
        self._offline_ratio: float | None = 1.0
        self._sharding = device_sharding
        self._process = (process_index, process_count)
        self._rows = None
        if device_sharding is not None:
            rows = None if like is None else like._rows
            self._rows = create_device_rows(prior, rl_config, device_sharding, num_runs=num_runs, like=rows)
        self.capacity = self._choose_capacity()  # the largest number of updates that one feed serves
        self._prefetcher: Prefetcher | RowDraws = self._start(first_step)
        if self._epochs_end:
            self._report_epochs()

    def sample_feed(self, num_updates: int) -> Feed:
        """The batches of the next steps, on the devices. Raises what went wrong while a batch was prepared."""
        if not 1 <= num_updates <= self.capacity:
            raise ValueError(f"a feed of this loader serves 1 to {self.capacity} updates; found {num_updates}")
        if self._rows is not None and isinstance(self._prefetcher, RowDraws):
            return self._rows.feed(*self._prefetcher.take(num_updates))
        prepared = [self._next() for _ in range(num_updates)]
        assert isinstance(self._prefetcher, Prefetcher)
        self._prefetcher.raise_depth(num_updates)  # The next call will want about as many as this one.
        if self.capacity == 1:
            return StackedBatches(prepared[0])
        assert self._sharding is not None
        places = NamedSharding(self._sharding.mesh, PartitionSpec(None, *self._sharding.spec))
        return StackedBatches(_place(_stack(prepared, self.capacity), places), self.capacity)

    def idle_feed(self) -> Feed | None:
        """A feed of the shape of the others that draws nothing; None if the data is not on the devices."""
        shape = (1, self.batch_size)
        return None if self._rows is None else self._rows.feed(np.zeros(shape, np.int32), np.ones(shape, np.float32))

    def sample_batch(self) -> Batch:
        """The batch of the next step. Raises what went wrong while the batch was prepared."""
        return self._next() if self.capacity == 1 else first_batch(self.sample_feed(1))

    def _next(self) -> Batch:
        step = self._prefetcher.step
        if self._epochs_end and step % self.steps_per_epoch == 0 and step != self._first_step:
            self._restart(step)  # other episodes come into memory
        assert isinstance(self._prefetcher, Prefetcher)
        return self._prefetcher.get()

    def mix_replay(self, replay: Dataset, offline_ratio: float | None) -> None:
        """From the next batch on, takes `offline_ratio` of each batch from the dataset and the rest from `replay`.

        With None, dataset and replay are one buffer. Call this again when the replay has grown.
        """
        self._builders = [self._builders[0], BatchBuilder(replay, self._rl_config)]
        self._offline_ratio = offline_ratio
        if self._rows is not None:
            self._rows.extend(self._builders[1])
        self._restart(self._prefetcher.step)

    def reads_data_of(self, rl_config: RLTrainConfig, kept: frozenset[int] | None) -> bool:
        """Whether the data of a config, with these held-out episodes (None: chosen now), is that of this loader."""
        own = self._rl_config
        is_equal = (own.data, own.model, own.qchunking) == (rl_config.data, rl_config.model, rl_config.qchunking)
        return is_equal and self.dataset.kept == kept

    def draws_windows_of(self, other: "DataLoader") -> bool:
        """Whether the prior data of another loader with the same config, up to its rewards, has the same windows.

        Rewards may end an episode before its last step, and successes may be drawn more often.
        """
        if self._rl_config.qchunking.success_ratio is not None:
            return False
        own, others = self.dataset.table.offsets, other.dataset.table.offsets
        return self.dataset.fingerprint == other.dataset.fingerprint and np.array_equal(own, others)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which as many windows are drawn as the readable episodes have steps."""
        frames = self.dataset.frames
        share = 1.0 if frames is None else frames.capacity / len(self.dataset.source)
        return max(1, round(share * self.dataset.table.num_rows / self.batch_size))

    @property
    def _epochs_end(self) -> bool:
        """Whether other episodes become readable with every epoch: a memory pool that holds some of them."""
        frames = self.dataset.frames
        return frames is not None and frames.capacity < len(self.dataset.source)

    def state_dict(self) -> dict[str, int]:
        """The cursor: a few integers from which `load_state_dict` goes on with the very same batches."""
        return {"seed": self._rl_config.seed, "step": self._prefetcher.step, "dataset": self.dataset.fingerprint}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on with the step at which the state was taken."""
        if int(state["seed"]) != self._rl_config.seed:
            raise ValueError(
                f"the cursor is of a run with seed {int(state['seed'])}, this run has seed {self._rl_config.seed}; "
                "resume with the same config"
            )
        if int(state["dataset"]) != self.dataset.fingerprint:
            logger.warning(
                "the dataset is not the one that the cursor was saved with: the run goes on at step %d with "
                "other batches than it would have had",
                int(state["step"]),
            )
        self._restart(int(state["step"]))

    def stop(self) -> None:
        """Stops the threads; the loader cannot be used afterwards, and the dataset stays open."""
        self._prefetcher.close()

    def close(self) -> None:
        """Stops the threads and closes the files; the loader cannot be used afterwards."""
        self.stop()
        self.dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _report_epochs(self) -> None:
        """Warns that batches come from some episodes at a time, or refuses this where all episodes are wanted."""
        num_episodes = len(self.dataset.source)
        if self._rl_config.training.online_steps and self._rl_config.online.offline_ratio is None:
            self.close()
            raise ConfigError(
                f"online.offline_ratio None draws from all episodes, but data.episodes_per_memory_pool keeps "
                f"{self._num_readable} of {num_episodes} in memory; build a frame cache with `acrlpd data cache`, or "
                "name a ratio"
            )
        logger.warning(
            "batches come from %d of %d episodes at a time, which other episodes replace every %d steps; build a "
            "frame cache (`acrlpd data cache`) to draw from all episodes at any time",
            self._num_readable,
            num_episodes,
            self.steps_per_epoch,
        )

    def _choose_capacity(self) -> int:
        if self._rows is not None:
            return ROWS_CAPACITY
        # Several processes make one update in a call, unless the config says otherwise: their calls are not timed.
        makes_one = self._process[1] > 1 and self._rl_config.training.updates_per_call is None
        if self._sharding is None or makes_one:
            return 1
        spec = batch_spec(dataclasses.replace(self._rl_config, batch_size=self.batch_size))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(spec))
        return max(1, min(_TRANSFER_BYTES // size, _MOST_BATCHES_PER_TRANSFER))

    def _sampler(self, stream: int, builder: BatchBuilder | JoinedBuilder, episodes: np.ndarray) -> WindowSampler:
        lengths, qchunking = np.diff(builder.offsets), self._rl_config.qchunking
        # A young replay, or one filling of a memory pool, may hold only episodes that are shorter than a chunk: windows
        # past their ends are all there is to learn from. A dataset that has only such episodes is a mistake.
        is_short = lengths[episodes].max() < qchunking.horizon_length
        may_be_short = stream > 0 or lengths.max() >= qchunking.horizon_length
        return WindowSampler(
            lengths,
            seed=self._rl_config.seed,
            stream=stream,
            horizon_length=qchunking.horizon_length,
            sequence_ratio=0.0 if is_short and may_be_short else qchunking.sequence_ratio,
            success_ratio=qchunking.success_ratio,
            steps_to_success=builder.steps_to_success,
            episodes=episodes,
            # Noise is judged together with all steps of its chunk, so a window begins where a chunk was begun.
            stride=1 if self._rl_config.noise_dim is None else qchunking.horizon_length,
        )

    def _start(self, step: int) -> Prefetcher | RowDraws:
        epoch = step // self.steps_per_epoch
        self._first_step = step
        parts = self._make_parts(epoch)
        if self._rows is not None:
            workers = self._rl_config.data.num_workers
            return RowDraws(parts, self._process, first_step=step, num_workers=workers)
        return Prefetcher(
            _build_batches(parts, self._process, self._sharding if self.capacity == 1 else None),
            first_step=step,
            end_step=(epoch + 1) * self.steps_per_epoch if self._epochs_end else math.inf,
            num_workers=self._rl_config.data.num_workers,
            depth=self._rl_config.data.prefetch_batches,
        )

    def _make_parts(self, epoch: int) -> list[Part]:
        """What each batch is made of: windows of the dataset, and of the replay if there is one."""
        readable = [_readable_episodes(builder.dataset, epoch) for builder in self._builders]
        self._num_readable = len(readable[0])
        if self._offline_ratio is None:
            joined = JoinedBuilder(self._builders)
            return [(joined, self.batch_size, self._sampler(0, joined, np.arange(len(joined.offsets) - 1)))]
        num_processes = self._process[1]
        num_offline = round(self._offline_ratio * self.batch_size / num_processes) * num_processes
        sizes = (num_offline, self.batch_size - num_offline)
        return [
            (builder, size, self._sampler(i, builder, episodes))
            for i, (builder, size, episodes) in enumerate(zip(self._builders, sizes, readable, strict=False))
        ]

    def _restart(self, step: int) -> None:
        self._prefetcher.close()
        self._prefetcher = self._start(step)


def _readable_episodes(dataset: Dataset, epoch: int) -> np.ndarray:
    """Positions of the episodes whose frames can be read in an epoch."""
    return np.arange(len(dataset.table.offsets) - 1) if dataset.frames is None else dataset.frames.prepare(epoch)


# The functions that threads run must not refer to the loader, so that dropping the loader ends the threads.
def _build_batches(
    parts: Sequence[Part], process: tuple[int, int], sharding: NamedSharding | None
) -> Callable[[int], Batch]:
    """Makes the batch of a step; with a sharding, on the devices."""

    def build(step: int) -> Batch:
        batches = [builder.build(*sampler.sample(step, size, *process)) for builder, size, sampler in parts if size]
        batch = interleave(batches)
        return batch if sharding is None else _place(batch, sharding)

    return build


def _stack(batches: Sequence[Batch], capacity: int) -> Batch:
    """Batches with a new leading axis [capacity], of which only the first entries are filled."""

    def stack(*arrays: np.ndarray) -> np.ndarray:
        stacked = np.empty((capacity, *arrays[0].shape), arrays[0].dtype)
        np.stack(arrays, out=stacked[: len(arrays)])
        return stacked

    return jax.tree.map(stack, *batches)


def _place(batch: Batch, sharding: NamedSharding) -> Batch:
    """The parts of all processes as global arrays on the devices."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def create_data_loader(
    rl_config: RLTrainConfig,
    batch_size: int | None = None,
    *,
    device_sharding: NamedSharding | None = None,
    num_runs: int = 1,
    like: DataLoader | None = None,
    kept: frozenset[int] | None = None,
) -> DataLoader:
    """Opens the dataset of a config and starts loading it.

    `batch_size` is that of the config unless given, and counts the windows of all processes together. `num_runs` runs
    train on the devices together. `like` is the loader of another one of them: if both runs have the same data without
    images, they share the data in memory. Frames are not shared, because each run draws from other episodes. `kept`
    are the held-out episodes of a run that goes on.
    """
    is_shared = like is not None and like.dataset.frames is None and like.reads_data_of(rl_config, kept)
    return DataLoader(
        like.dataset if like is not None and is_shared else open_dataset(rl_config, kept),
        rl_config,
        batch_size=batch_size,
        device_sharding=device_sharding,
        num_runs=num_runs,
        like=like,
    )
