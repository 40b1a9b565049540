"""A pool of decoded episodes in memory, for machines without disk space for a frame cache."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from acrlpd.data.frames.resize import resize_with_pad
from acrlpd.data.sources.source import EpisodeSource, require_steps

# Frames that are decoded and resized at once by each thread.
DECODE_BLOCK = 32


class MemoryPool:
    """A FrameStore of `episodes_per_memory_pool` episodes that changes with every refresh.

    It holds at most episodes x steps x cameras x height x width x 3 bytes: leaving episodes are dropped
    before new ones are decoded.
    """

    def __init__(
        self,
        source: EpisodeSource,
        cameras: Sequence[str],
        height: int,
        width: int,
        episodes_per_memory_pool: int,
    ) -> None:
        if episodes_per_memory_pool < 1:
            raise ValueError(f"episodes_per_memory_pool must be at least 1, found {episodes_per_memory_pool}")
        self.source = source
        self.cameras = tuple(cameras)
        self.height = height
        self.width = width
        self._lengths = source.lengths
        self._capacity = min(episodes_per_memory_pool, len(source))
        self._pool: dict[int, dict[str, np.ndarray]] = {}  # position -> camera -> uint8 [length, h, w, 3]
        self._threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="pool")

    @property
    def episodes(self) -> np.ndarray:
        return np.array(sorted(self._pool), np.int64)

    def refresh_memory_pool(self, epoch_seed: int) -> None:
        """Fills the pool with the episodes that belong to the seed; not while another thread reads.

        The choice depends on the seed alone, so a resumed run has the same pool. Seeds that count up walk
        through all episodes before one comes again.
        """
        chosen = self._choose(epoch_seed)
        self._pool = {position: self._pool[position] for position in chosen if position in self._pool}
        missing = [position for position in chosen if position not in self._pool]
        decoded = self._threads.map(self._decode, missing)
        self._pool |= dict(zip(missing, decoded, strict=True))

    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        require_steps(self._lengths, episodes, ts)
        for k, (position, t) in enumerate(zip(episodes.tolist(), ts.tolist(), strict=True)):
            if position not in self._pool:
                raise KeyError(f"episode at position {position} is not in the memory pool; sample from store.episodes")
            out[k] = self._pool[position][camera][t]

    def close(self) -> None:
        self._pool = {}
        self._threads.shutdown()
        self.source.close()

    def _choose(self, epoch_seed: int) -> list[int]:
        """A slice of a permutation that changes each time all episodes have been through the pool."""
        count, size = len(self._lengths), self._capacity
        first, start = divmod(epoch_seed * size, max(count, 1))
        order = np.concatenate([_permutation(first, count), _permutation(first + 1, count)])
        return sorted(set(order[start : start + size].tolist()))

    def _decode(self, position: int) -> dict[str, np.ndarray]:
        index, length = self.source.indices[position], int(self._lengths[position])
        frames = {}
        for camera in self.cameras:
            frames[camera] = np.empty((length, self.height, self.width, 3), np.uint8)
            for start in range(0, length, DECODE_BLOCK):
                ts = np.arange(start, min(start + DECODE_BLOCK, length))
                block = self.source.read_frames(index, camera, ts)
                frames[camera][ts] = resize_with_pad(block, self.height, self.width)
        return frames


def _permutation(epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([epoch, count]).permutation(count)
