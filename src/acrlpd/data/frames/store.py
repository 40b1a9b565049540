"""Frames at the model's resolution for a loader: decoded on demand, from a frame cache or a memory pool."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from acrlpd.data.frames.cache import FrameCache
from acrlpd.data.frames.memory_pool import MemoryPool
from acrlpd.data.frames.resize import resize_with_pad
from acrlpd.data.sources.source import DatasetError, EpisodeSource, FrameStore


class DirectFrames:
    """A FrameStore that decodes every frame when it is asked for: no preparation, the most CPU."""

    def __init__(self, source: EpisodeSource, cameras: Sequence[str], height: int, width: int) -> None:
        self.source = source
        self.cameras = tuple(cameras)
        self.height = height
        self.width = width
        self._threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="decode")

    @property
    def episodes(self) -> np.ndarray:
        return np.arange(len(self.source), dtype=np.int64)

    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        # Frames of one episode together and in order share a seek and a decode.
        order = np.lexsort((ts, episodes))
        cuts = np.flatnonzero(np.diff(episodes[order])) + 1
        groups = [group for group in np.split(order, cuts) if group.size]

        def read(group: np.ndarray) -> None:
            index = self.source.indices[int(episodes[group[0]])]
            frames = self.source.read_frames(index, camera, ts[group])
            out[group] = resize_with_pad(frames, self.height, self.width)

        list(self._threads.map(read, groups))

    def close(self) -> None:
        self._threads.shutdown()
        self.source.close()


def open_frame_store(
    source: EpisodeSource,
    *,
    height: int,
    width: int,
    cameras: Sequence[str] | None = None,
    cache_dir: str | Path | None = None,
    episodes_per_memory_pool: int | None = None,
) -> FrameStore:
    """The store that a loader reads from.

    With `cache_dir` the frame cache there (build it with `acrlpd data cache`), with
    `episodes_per_memory_pool` a pool of so many decoded episodes in memory, else the decoder itself.
    Sample from `store.source`: a cache may lack episodes that could not be decoded.
    """
    cameras = source.cameras if cameras is None else tuple(cameras)
    unknown = [camera for camera in cameras if camera not in source.cameras]
    if unknown:
        raise DatasetError(f"{source.root}: no camera {unknown[0]!r}; it has {list(source.cameras)}")
    if cache_dir is not None and episodes_per_memory_pool is not None:
        raise ValueError("give cache_dir or episodes_per_memory_pool, not both")
    if cache_dir is not None:
        return FrameCache(Path(cache_dir), source, cameras=cameras, height=height, width=width)
    if episodes_per_memory_pool is not None:
        return MemoryPool(source, cameras, height, width, episodes_per_memory_pool)
    return DirectFrames(source, cameras, height, width)
