"""The data loader: batches of windows, prepared ahead by threads and put on the devices."""

import dataclasses
import logging
import math
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.batches import BatchBuilder, WindowSampler
from acrlpd.data.pipeline.dataset import Dataset, open_dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DataLoader:
    """Endless batches of action-chunk transitions.

    The batch of a step depends on the seed, the step and the dataset alone (and on the size of the memory pool, if the
    config has one), not on threads, restarts or the number of processes. Each process gets its part of the global
    batch. With a `device_sharding` the parts form global arrays on the devices, without one they are numpy arrays.
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
        self._prefetcher: Prefetcher[Batch] | None = None
        self._start(step=0)
        if self._epochs_end:
            logger.warning(
                "batches come from %d of %d episodes at a time, which other episodes replace every %d steps; build a "
                "frame cache (`acrlpd data cache`) to draw from all episodes at any time",
                len(self._samplers[0].episodes),
                len(dataset.source),
                self.steps_per_epoch,
            )

    def sample_batch(self) -> Batch:
        """The batch of the next step. Raises what went wrong while the batch was prepared."""
        step = self._running().step
        if self._epochs_end and step % self.steps_per_epoch == 0 and step != self._first_step:
            self._restart(step)  # other episodes come into memory
        return self._running().get()

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            yield self.sample_batch()

    @property
    def dataset(self) -> Dataset:
        """The prior data."""
        return self._dataset

    def mix_replay(self, replay: Dataset, offline_ratio: float) -> None:
        """From the next batch on, takes `offline_ratio` of each batch from the dataset and the rest from `replay`.

        Call this again when the replay has grown.
        """
        num_processes = self._process[1]
        num_offline = round(offline_ratio * self.batch_size / num_processes) * num_processes
        prior = dataclasses.replace(self._parts[0], batch_size=num_offline)
        mixed = _Part(replay, BatchBuilder(replay, self._rl_config), self.batch_size - num_offline)
        self._parts = [prior, mixed]
        self._restart(self._running().step)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which as many windows are drawn as the readable episodes have steps."""
        frames, num_steps = self._dataset.frames, int(self._dataset.table.offsets[-1])
        share = 1.0 if frames is None else frames.capacity / len(self._dataset.source)
        return max(1, round(share * num_steps / self.batch_size))

    @property
    def _epochs_end(self) -> bool:
        """Whether other episodes become readable with every epoch: a memory pool that holds some of them."""
        frames = self._dataset.frames
        return frames is not None and frames.capacity < len(self._dataset.source)

    def state_dict(self) -> dict[str, int]:
        """The cursor: a few integers from which `load_state_dict` goes on with the very same batches."""
        return {"seed": self._seed, "step": self._running().step, "dataset": self._fingerprint()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on with the step at which the state was taken."""
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
        self._restart(int(state["step"]))

    def get_dataset_statistics(self) -> dict[str, Any]:
        """Sizes, success rate, rewards, and how many steps start a window that lies inside its episode."""
        source, rewards = self._dataset.source, self._dataset.rewards
        lengths = np.diff(self._dataset.table.offsets)
        returns = np.add.reduceat(rewards.rewards, self._dataset.table.offsets[:-1])
        sampler = self._samplers[0]
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
                "origin": rewards.origin.describe(self._rl_config.data.rewards),
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

    def _sampler(self, stream: int, dataset: Dataset, epoch: int) -> WindowSampler:
        lengths = np.diff(dataset.table.offsets)
        episodes = np.arange(len(lengths)) if dataset.frames is None else dataset.frames.prepare(epoch)
        # A young replay, or one filling of a memory pool, may hold only episodes that are shorter than a chunk: windows
        # past their ends are all there is to learn from. A dataset that has only such episodes is a mistake.
        is_short = lengths[episodes].max() < self._horizon_length
        may_be_short = stream > 0 or lengths.max() >= self._horizon_length
        return WindowSampler(
            lengths,
            seed=self._seed,
            stream=stream,
            horizon_length=self._horizon_length,
            sequence_ratio=0.0 if is_short and may_be_short else self._sequence_ratio,
            episodes=episodes,
        )

    def _start(self, step: int) -> None:
        # The function that the threads run must not refer to the loader, so that dropping the loader ends them.
        epoch = step // self.steps_per_epoch
        self._first_step = step
        self._samplers = [self._sampler(i, part.dataset, epoch) for i, part in enumerate(self._parts)]
        parts = [(sampler, part) for sampler, part in zip(self._samplers, self._parts, strict=True) if part.batch_size]
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
            build,
            first_step=step,
            end_step=(epoch + 1) * self.steps_per_epoch if self._epochs_end else math.inf,
            num_workers=self._num_workers,
            depth=self._prefetch_batches,
        )

    def _restart(self, step: int) -> None:
        self._stop()
        self._start(step)

    def _stop(self) -> None:
        self._running().close()
        self._prefetcher = None

    def _running(self) -> "Prefetcher[Batch]":
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
    """Joins batches into one, each spread evenly over the result, so that every shard gets its share of each."""
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


class _Shared(Generic[T]):
    """What the threads see. They hold no reference to the Prefetcher, so dropping the Prefetcher stops them."""

    def __init__(self, build: Callable[[int], T], first_step: int, end_step: float, depth: int) -> None:
        self.build = build
        self.end_step = end_step
        self.depth = depth
        self.wanted = first_step  # the step that the consumer takes next
        self.next_step = first_step  # the step that a thread takes next
        self.results: dict[int, T] = {}
        self.failures: dict[int, Exception] = {}
        self.closed = False
        self.changed = threading.Condition()

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.closed or self.next_step < min(self.wanted + self.depth, self.end_step)
                )
                if self.closed:
                    return
                step = self.next_step
                self.next_step += 1
            try:
                result = self.build(step)
            except Exception as error:  # raised again in the consumer
                error.add_note(f"while the batch of step {step} was prepared")
                with self.changed:
                    self.failures[step] = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.results[step] = result
                del result  # otherwise the result would live on while this thread waits
                self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.closed = True
            self.results.clear()
            self.changed.notify_all()


class Prefetcher(Generic[T]):
    """Results of `build(step)` for steps from `first_step` to before `end_step`, in order, prepared ahead by threads.

    At most max(depth, num_workers) results exist beyond the result in use. Without workers `get` builds each result.
    An error of a thread is raised by `get` for the step that the error belongs to.
    """

    def __init__(
        self,
        build: Callable[[int], T],
        *,
        first_step: int,
        end_step: float = math.inf,
        num_workers: int,
        depth: int,
    ) -> None:
        self._shared = _Shared(build, first_step, end_step, max(depth, num_workers))
        self._threads = [
            threading.Thread(target=self._shared.work, name=f"acrlpd-data-{i}", daemon=True) for i in range(num_workers)
        ]
        # Also runs at interpreter exit, where a thread inside a device transfer would otherwise be cut off.
        self._close = weakref.finalize(self, _stop, self._shared, self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def step(self) -> int:
        """The step that `get` returns next."""
        return self._shared.wanted

    def get(self) -> T:
        """The result of the next step; waits until the result is there."""
        shared = self._shared
        if not self._threads:
            result = shared.build(shared.wanted)
            shared.wanted += 1
            return result
        with shared.changed:
            step = shared.wanted
            shared.changed.wait_for(lambda: shared.closed or step in shared.results or step in shared.failures)
            if step in shared.failures:
                raise shared.failures[step]
            if shared.closed:
                raise RuntimeError("the data loader was closed")
            shared.wanted += 1
            shared.changed.notify_all()
            return shared.results.pop(step)

    def close(self) -> None:
        """Stops the threads and waits for their end; results that nobody took are dropped."""
        self._close()


def _stop(shared: _Shared, threads: list[threading.Thread]) -> None:
    shared.stop()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
