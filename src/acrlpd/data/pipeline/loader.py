"""The data loader: batches of windows, prepared ahead, on the devices, the same however they are made."""

import dataclasses
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.memory_pool import MemoryPool
from acrlpd.data.pipeline.batch_builder import BatchBuilder
from acrlpd.data.pipeline.dataset import Dataset, open_dataset
from acrlpd.data.pipeline.prefetch import Prefetcher
from acrlpd.data.pipeline.windows import WindowSampler

logger = logging.getLogger(__name__)


class DataLoader:
    """Endless batches of action-chunk transitions.

    The batch of a step depends on the seed, the step and the dataset alone (and on the episodes in the
    memory pool, where there is one), not on threads, restarts or the number of processes. Each process
    gets its part of the global batch; with a `device_sharding` the parts form global arrays on the
    devices, without one they are numpy arrays.
    """

    def __init__(
        self,
        dataset: Dataset,
        rl_config: RLTrainConfig,
        *,
        batch_size: int,
        device_sharding: jax.sharding.Sharding | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Batches of `batch_size` windows over all processes; use `create_data_loader`."""
        if batch_size % process_count:
            raise ValueError(
                f"batch_size {batch_size} cannot be split over {process_count} processes; choose a multiple"
            )
        self.batch_size = batch_size
        self._dataset = dataset
        self._seed = rl_config.seed
        self._num_workers = rl_config.data.num_workers
        self._prefetch_batches = rl_config.data.prefetch_batches
        self._horizon_length = rl_config.qchunking.horizon_length
        self._sequence_ratio = rl_config.qchunking.sequence_ratio
        self._rl_config = rl_config
        self._parts = [_Part(dataset, BatchBuilder(dataset, rl_config), batch_size)]
        self._sharding = device_sharding
        self._process = (process_index, process_count)
        self._pool_seed = 0
        self._prefetcher: Prefetcher[Batch] | None = None
        if isinstance(dataset.frames, MemoryPool):
            dataset.frames.refresh_memory_pool(self._pool_seed)
        self._start(step=0)
        if self.steps_per_memory_pool is not None:
            logger.warning(
                "batches come from %d of %d episodes until refresh_memory_pool is called with the next seed; "
                "build a frame cache (`acrlpd data cache`) to draw from all at any time",
                len(self._sampler().episodes),
                len(dataset.source),
            )

    def sample_batch(self) -> Batch:
        """The batch of the next step. Raises what went wrong while it was prepared."""
        return self._running().get()

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            yield self.sample_batch()

    def refresh_memory_pool(self, epoch_seed: int) -> None:
        """Replaces the decoded episodes in memory by those of another seed, from the next batch on.

        Without a memory pool (frame cache, decoding on demand, no cameras) every episode can be drawn at
        any time and nothing changes.
        """
        step = self._running().step
        if not isinstance(self._dataset.frames, MemoryPool):
            return
        self._stop()
        self._pool_seed = epoch_seed
        self._dataset.frames.refresh_memory_pool(epoch_seed)
        self._start(step)

    @property
    def dataset(self) -> Dataset:
        """The prior data."""
        return self._dataset

    def mix_replay(self, replay: Dataset, offline_ratio: float) -> None:
        """From the next batch on, takes `offline_ratio` of each batch from the dataset and the rest from `replay`.

        Call it again when the replay has grown.
        """
        step = self._running().step
        num_processes = self._process[1]
        num_offline = round(offline_ratio * self.batch_size / num_processes) * num_processes
        prior = dataclasses.replace(self._parts[0], batch_size=num_offline)
        mixed = _Part(replay, BatchBuilder(replay, self._rl_config), self.batch_size - num_offline)
        self._stop()
        self._parts = [prior, mixed]
        self._start(step)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which as many windows were drawn as there are steps within reach."""
        statistics = self.get_dataset_statistics()
        share = statistics["num_sampled_episodes"] / statistics["num_episodes"]
        return max(1, round(share * statistics["num_frames"] / self.batch_size))

    @property
    def steps_per_memory_pool(self) -> int | None:
        """Steps in which as many windows are drawn as the pool has frames: a good time for the next refresh.

        None: there is nothing to refresh, because every episode can be drawn at any time.
        """
        frames = self._dataset.frames
        if not isinstance(frames, MemoryPool) or len(frames.episodes) == len(self._dataset.source):
            return None
        frames_in_pool = int(self._dataset.table.offsets[-1]) * len(frames.episodes) / len(self._dataset.source)
        return math.ceil(frames_in_pool / self.batch_size)

    def state_dict(self) -> dict[str, int]:
        """The cursor: a few integers from which `load_state_dict` goes on with the very same batches."""
        return {
            "seed": self._seed,
            "step": self._running().step,
            "pool_seed": self._pool_seed,
            "dataset": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where the loader that gave this state stood."""
        if int(state["seed"]) != self._seed:
            raise ValueError(
                f"the cursor is of a run with seed {int(state['seed'])}, this run has seed {self._seed}; "
                "resume with the same config"
            )
        if int(state["dataset"]) != self._fingerprint():
            logger.warning(
                "the dataset is not the one that the cursor was saved with: the run goes on at step %d with "
                "other batches than it would have had",
                int(state["step"]),
            )
        self._stop()
        pool_seed = int(state["pool_seed"])
        if isinstance(self._dataset.frames, MemoryPool) and pool_seed != self._pool_seed:
            self._dataset.frames.refresh_memory_pool(pool_seed)
        self._pool_seed = pool_seed
        self._start(int(state["step"]))

    def get_dataset_statistics(self) -> dict[str, Any]:
        """Sizes, success rate, rewards and what share of all steps starts a window inside its episode."""
        source, rewards = self._dataset.source, self._dataset.rewards
        lengths = np.diff(self._dataset.table.offsets)
        returns = np.add.reduceat(rewards.rewards, self._dataset.table.offsets[:-1])
        sampler = self._sampler()
        return {
            "dataset": str(source.root),
            "format": source.format,
            "num_episodes": len(source),
            "num_skipped_episodes": len(source.skipped),
            "num_sampled_episodes": len(sampler.episodes),
            "num_frames": int(lengths.sum()),
            "fps": float(source.fps),
            "episode_length": {
                "min": int(lengths.min()),
                "mean": float(lengths.mean()),
                "max": int(lengths.max()),
            },
            "success_rate": float(rewards.success.mean()),
            "reward": {
                "origin": rewards.origin,
                "min": float(rewards.rewards.min()),
                "mean": float(rewards.rewards.mean()),
                "max": float(rewards.rewards.max()),
                "mean_return": float(returns.mean()),
            },
            "windows_inside_episode": sampler.num_inside,
            "windows_past_episode_end": sampler.num_crossing,
            "cameras": dict(self._dataset.transforms.cameras),
            "prompts": [] if self._dataset.prompts is None else self._dataset.prompts.tolist(),
        }

    def close(self) -> None:
        """Stops the threads and closes the files; the loader cannot be used afterwards."""
        if self._prefetcher is not None:
            self._stop()
            if self._dataset.frames is not None:
                self._dataset.frames.close()
            self._dataset.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sampler(self, part: int = 0) -> WindowSampler:
        dataset = self._parts[part].dataset
        lengths = np.diff(dataset.table.offsets)
        episodes = None if dataset.frames is None else dataset.frames.episodes
        # Where all that the policy lived so far, or all that is in memory just now, is shorter than a chunk, there is
        # nothing else to learn from. A dataset in which every episode is, is a mistake.
        longest = lengths.max() if episodes is None else lengths[np.asarray(episodes)].max()
        is_short = longest < self._horizon_length and (part > 0 or lengths.max() >= self._horizon_length)
        return WindowSampler(
            lengths,
            seed=self._seed,
            stream=part,
            horizon_length=self._horizon_length,
            sequence_ratio=0.0 if is_short else self._sequence_ratio,
            episodes=episodes,
        )

    def _start(self, step: int) -> None:
        # What the threads run must not refer to the loader, so that dropping the loader ends them.
        parts = [(self._sampler(i), part) for i, part in enumerate(self._parts) if part.batch_size]
        sharding, (process_index, process_count) = self._sharding, self._process

        def build(step: int) -> Batch:
            batches = []
            for sampler, part in parts:
                windows = sampler.sample(
                    step, part.batch_size, process_index=process_index, process_count=process_count
                )
                batches.append(part.builder.build(*windows))
            batch = interleave(batches)
            return batch if sharding is None else put_batch(batch, sharding)

        self._prefetcher = Prefetcher(
            build, first_step=step, num_workers=self._num_workers, depth=self._prefetch_batches
        )

    def _stop(self) -> None:
        self._running().close()
        self._prefetcher = None

    def _running(self) -> Prefetcher[Batch]:
        if self._prefetcher is None:
            raise RuntimeError("the data loader was closed")
        return self._prefetcher

    def _fingerprint(self) -> int:
        """A number that changes with the dataset and with the episodes chosen from it."""
        source = self._dataset.source
        return zlib.crc32(repr((source.identity, source.indices)).encode())


@dataclasses.dataclass(frozen=True)
class _Part:
    """A dataset and the windows of each batch that come from it."""

    dataset: Dataset
    builder: BatchBuilder
    batch_size: int  # over all processes


def interleave(batches: Sequence[Batch]) -> Batch:
    """One batch of several, each spread evenly over it, so that every shard gets its share."""
    if len(batches) == 1:
        return batches[0]
    sizes = [len(batch.step_id) for batch in batches]
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    order = np.argsort(places, kind="stable")
    return jax.tree.map(lambda *parts: np.concatenate(parts)[order], *batches)


def put_batch(batch: Batch, sharding: jax.sharding.Sharding) -> Batch:
    """This process's part of a batch as part of global device arrays; images stay uint8."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def create_data_loader(
    rl_config: RLTrainConfig,
    batch_size: int | None = None,
    *,
    device_sharding: jax.sharding.Sharding | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> DataLoader:
    """Opens the dataset of a config and starts loading it.

    `batch_size` is that of the config unless given, and counts the windows of all processes together.
    """
    return DataLoader(
        open_dataset(rl_config),
        rl_config,
        batch_size=rl_config.batch_size if batch_size is None else batch_size,
        device_sharding=device_sharding,
        process_index=jax.process_index() if process_index is None else process_index,
        process_count=jax.process_count() if process_count is None else process_count,
    )
