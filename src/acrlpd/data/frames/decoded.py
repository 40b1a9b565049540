"""Frames without a frame cache: decoded on demand or some episodes at a time. Also the choice between the stores."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from acrlpd.cores import usable_cores
from acrlpd.data.frames.store import FrameCache, FrameStore, require_steps, resize_with_pad
from acrlpd.data.sources.source import EpisodeSource, step_blocks


class DecodedFrames(FrameStore):
    """Decodes every frame when it is asked for: no preparation, the most CPU."""

    def __init__(self, source: EpisodeSource, cameras: Sequence[str], height: int, width: int) -> None:
        super().__init__(source, cameras, height, width)
        self._threads = ThreadPoolExecutor(min(16, usable_cores()), thread_name_prefix="decode")

    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        # Frames of one episode together and in order share a seek and a decode.
        order = np.lexsort((ts, episodes))
        cuts = np.flatnonzero(np.diff(episodes[order])) + 1
        groups = [group for group in np.split(order, cuts) if group.size]

        def read(group: np.ndarray) -> None:
            out[group] = self._decode(int(episodes[group[0]]), camera, ts[group])

        list(self._threads.map(read, groups))

    def _decode(self, position: int, camera: str, ts: np.ndarray) -> np.ndarray:
        frames = self.source.read_frames(self.source.indices[position], camera, ts)
        return resize_with_pad(frames, self.height, self.width)

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class MemoryPool(DecodedFrames):
    """Holds some decoded episodes in memory, other ones in every epoch.

    Each frame is decoded once and in order, which takes less CPU than seeking the frames of random windows. The pool
    holds at most episodes x steps x cameras x height x width x 3 bytes: the episodes of the last epoch are dropped
    before new ones are decoded.
    """

    def __init__(self, source: EpisodeSource, cameras: Sequence[str], height: int, width: int, capacity: int) -> None:
        super().__init__(source, cameras, height, width)
        self._lengths = source.lengths
        self._capacity = min(capacity, len(source))
        self._pool: dict[int, dict[str, np.ndarray]] = {}  # position -> camera -> uint8 [length, h, w, 3]

    @property
    def capacity(self) -> int:
        return self._capacity

    def prepare(self, epoch: int) -> np.ndarray:
        """Decodes the episodes of an epoch; no other thread may read meanwhile.

        The choice depends on the epoch alone, so a resumed run has the same episodes. Consecutive epochs go through a
        permutation of all episodes before an episode comes again.
        """
        count = len(self._lengths)
        first, start = divmod(epoch * self._capacity, max(count, 1))
        order = np.concatenate([np.random.default_rng([k, count]).permutation(count) for k in (first, first + 1)])
        chosen = sorted(set(order[start : start + self._capacity].tolist()))
        self._pool = {position: self._pool[position] for position in chosen if position in self._pool}
        missing = [position for position in chosen if position not in self._pool]
        self._pool |= dict(zip(missing, self._threads.map(self._decode_episode, missing), strict=True))
        return np.array(chosen, np.int64)

    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        require_steps(self._lengths, episodes, ts)
        for k, (position, t) in enumerate(zip(episodes.tolist(), ts.tolist(), strict=True)):
            if position not in self._pool:
                raise KeyError(f"the episode at position {position} is not in the memory pool; read what it prepared")
            out[k] = self._pool[position][camera][t]

    def _decode_episode(self, position: int) -> dict[str, np.ndarray]:
        length, frames = int(self._lengths[position]), {}
        for camera in self.cameras:
            frames[camera] = np.empty((length, self.height, self.width, 3), np.uint8)
            for ts in step_blocks(length):
                frames[camera][ts] = self._decode(position, camera, ts)
        return frames

    def close(self) -> None:
        self._pool = {}
        super().close()


def open_frame_store(
    source: EpisodeSource,
    *,
    height: int,
    width: int,
    cameras: Sequence[str] | None = None,
    cache_dir: str | Path | None = None,
    episodes_per_memory_pool: int = 0,
) -> FrameStore:
    """The store that a loader reads from.

    `cache_dir` names a frame cache (build it with `acrlpd data cache`). Without a cache `episodes_per_memory_pool` asks
    for a pool of so many decoded episodes in memory, or frames are decoded when a batch needs them. Sample from
    `store.source`: a cache may lack episodes that could not be decoded.
    """
    cameras = source.cameras if cameras is None else cameras
    if cache_dir is not None:
        return FrameCache(Path(cache_dir), source, cameras, height, width)
    if episodes_per_memory_pool:
        return MemoryPool(source, cameras, height, width, episodes_per_memory_pool)
    return DecodedFrames(source, cameras, height, width)
