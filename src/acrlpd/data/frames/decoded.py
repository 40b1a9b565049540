"""Where a loader gets frames. Without a frame cache frames are decoded, on demand or some episodes at a time."""

import abc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from acrlpd.data.frames.resize import resize_with_pad
from acrlpd.data.sources.source import EpisodeSource, step_blocks


class FrameStore(abc.ABC):
    """Frames at the model's resolution: from a frame cache, from the decoder, or from a memory pool.

    `acrlpd.data.frames.store.open_frame_store` makes one.
    """

    def __init__(self, source: EpisodeSource, cameras: Sequence[str], height: int, width: int) -> None:
        """`source` holds the episodes that the store serves; positions below are positions in this source."""
        self.source = source
        self.cameras = tuple(cameras)
        self.height = height
        self.width = width

    @property
    def capacity(self) -> int:
        """Episodes that can be read at once; a memory pool holds only some of all."""
        return len(self.source)

    def prepare(self, epoch: int) -> np.ndarray:
        """Makes the episodes of an epoch readable; returns their sorted positions, int64 [capacity or fewer]."""
        return np.arange(len(self.source))

    @abc.abstractmethod
    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        """Frame ts[k] of `camera` in episode episodes[k] -> out[k]; out is uint8 [n, h, w, 3], C order.

        Safe to call from several threads at once.
        """

    def close(self) -> None:
        self.source.close()


def require_steps(lengths: np.ndarray, episodes: np.ndarray, ts: np.ndarray) -> None:
    """Raises IndexError if a step lies outside its episode; a store would read the frame of another episode."""
    outside = np.flatnonzero((ts < 0) | (ts >= lengths[episodes]))
    if outside.size:
        k = int(outside[0])
        length = lengths[episodes[k]]
        raise IndexError(f"the episode at position {episodes[k]} has steps 0..{length - 1}, asked for {ts[k]}")


class DecodedFrames(FrameStore):
    """Decodes every frame when it is asked for: no preparation, the most CPU."""

    def __init__(self, source: EpisodeSource, cameras: Sequence[str], height: int, width: int) -> None:
        super().__init__(source, cameras, height, width)
        self._threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="decode")

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
