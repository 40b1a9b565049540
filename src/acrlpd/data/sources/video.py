"""Random access to video frames: keyframe seek, then decode only what is needed.

Frames are matched by integer presentation timestamps, never by counting: a frame that is not where its
timestamp says is an error, not a wrong image.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import av
import av.error
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from acrlpd.data.sources.source import BadDataError

# Decoding this many frames that nobody asked for costs no more than a seek, at any interval of keyframes.
_DECODE_ON_FRAMES = 2
_MAX_IDLE_READERS = 48


class VideoReader:
    """One open video file. Not thread-safe: `VideoPool` hands each reader to one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._container = av.open(str(path))
        except FileNotFoundError:
            raise BadDataError("the video file is missing") from None
        except av.error.FFmpegError as error:
            raise BadDataError(f"not a readable video, truncated or damaged ({error.strerror})") from None
        if not self._container.streams.video:
            self._container.close()
            raise BadDataError("the file has no video stream")
        self._stream = self._container.streams.video[0]
        # One thread: several would decode frames ahead that random access does not use.
        self._stream.codec_context.thread_count = 1
        self._entries = self._stream.index_entries
        self._reformatter = VideoReformatter()
        self._decoded: Iterator[VideoFrame] = iter(())
        self._last: VideoFrame | None = None  # the frame decoded last
        self._pts = 0  # its presentation timestamp
        first = self._entries[0].timestamp if len(self._entries) else 0
        # The index holds decode timestamps, which B-frames shift against presentation timestamps.
        self._decode_shift = (self._stream.start_time or 0) - first
        assert self._stream.time_base is not None, "every video stream has a time base"
        self._time_base = float(self._stream.time_base)
        self.fps = float(self._stream.average_rate or 0)
        self.height: int = self._stream.height
        self.width: int = self._stream.width
        self._check_size()

    def close(self) -> None:
        """Frees the decoder now; a reference cycle would keep the decoder until the next garbage collection."""
        self._decoded = iter(())
        self._last = None
        self._container.close()

    def check_range(self, start: float, count: int, fps: float) -> None:
        """Raises when the file ends before `count` frames from `start` seconds on; decodes nothing."""
        if not len(self._entries):
            return
        # The duration does not say when the last frame begins: writers disagree about how long it is shown.
        last = (self._entries[len(self._entries) - 1].timestamp + self._decode_shift) * self._time_base
        if last < start + (count - 1.5) / fps:
            raise BadDataError(
                f"the last frame is at {last:.3f} s, expected {count} frames from {start:.3f} s at {fps:g} fps"
            )

    def numbering(self) -> tuple[float, float]:
        """(seconds of frame 0, frames per second), so that frames can be asked for by their number.

        Raises where frames are not evenly spaced: time would then lead to a neighbour of the one meant.
        """
        first = (self._stream.start_time or 0) * self._time_base
        times = np.array([entry.timestamp for entry in self._entries], np.float64)
        if len(times) < 2:
            return first, self.fps
        step = (times[-1] - times[0]) / (len(times) - 1)
        uneven = np.flatnonzero(np.abs(times - times[0] - step * np.arange(len(times))) > step / 4)
        if uneven.size:
            raise BadDataError(
                f"its frames are not evenly spaced (frame {uneven[0]} of {len(times)} is not where it should be), so "
                "they cannot be counted; encode it again at a constant rate"
            )
        return first, 1 / (step * self._time_base)

    def frame(self, second: float, fps: float) -> np.ndarray:
        """The frame at a time in the file, matched within half a frame: uint8 [h, w, 3]."""
        target, step = second / self._time_base, 1 / (fps * self._time_base)
        frame = self._decode_until(target, step)
        if abs(self._pts - target) > step / 2:
            raise BadDataError(
                f"no frame at {second:.4f} s: the nearest is at {self._pts * self._time_base:.4f} s, "
                f"more than half a frame ({0.5 / fps:.4f} s) away"
            )
        if frame.is_corrupt:
            raise BadDataError(f"the frame at {second:.4f} s is damaged")
        return self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()

    def _decode_until(self, target: float, step: float) -> VideoFrame:
        """The first frame that is not more than half a frame before the timestamp `target`."""
        where = f"timestamp {target:.0f} ({target * self._time_base:.4f} s)"
        try:
            if self._last is None or self._must_seek(target, step):
                self._seek(round(target), target + step / 2)
            while self._last is not None and self._pts < target - step / 2:
                self._advance()
        except av.error.FFmpegError as error:
            raise BadDataError(f"the video is damaged or truncated before {where}: {error.strerror}") from None
        if self._last is None:
            raise BadDataError(f"the video ends before {where}")
        return self._last

    def _seek(self, pts: int, latest: float) -> None:
        """Decodes the first frame from the keyframe at or before `pts` on.

        Frames just before a keyframe may need the one before it (an open group of pictures): then the first
        frame comes later than `latest`, and the seek starts from further back.
        """
        while True:
            self._container.seek(pts, stream=self._stream, backward=True)
            self._decoded = self._container.decode(self._stream)
            self._advance()
            keyframe = self._keyframe(pts)
            if self._last is None or self._pts <= latest or keyframe <= 0:
                return
            pts = self._entries[keyframe].timestamp + self._decode_shift - 1

    def _advance(self) -> None:
        self._last = next(self._decoded, None)
        if self._last is not None:
            if self._last.pts is None:
                raise BadDataError("a frame carries no timestamp")
            self._pts = self._last.pts

    def _must_seek(self, target: float, step: float) -> bool:
        """Whether the target lies behind, or so far ahead that decoding from its own keyframe is shorter."""
        ahead = target - self._pts
        if -step / 2 <= ahead <= _DECODE_ON_FRAMES * step:
            return False
        return ahead < 0 or self._keyframe(round(target)) != self._keyframe(self._pts)

    def _keyframe(self, pts: int) -> int:
        return self._entries.search_timestamp(pts - self._decode_shift, backward=True)

    def _check_size(self) -> None:
        count, size = len(self._entries), self.path.stat().st_size
        if not count:
            return
        end = self._entries[count - 1].pos + self._entries[count - 1].size
        if end > size:
            self._container.close()
            raise BadDataError(f"truncated: the last of {count} frames ends at byte {end}, the file has {size}")


class VideoPool:
    """Open readers, least recently used out first, so that decoders never pile up.

    A reader belongs to one thread while it reads, and some readers wait for the next use. Memory is bounded by the
    decoders of those that wait and of the reading threads.
    """

    def __init__(self) -> None:
        self._idle: list[VideoReader] = []  # oldest first
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reader(self, path: Path) -> Iterator[VideoReader]:
        """Lends a reader of `path`. A reader that failed is closed and never lent again."""
        with self._lock:
            idle = next((reader for reader in reversed(self._idle) if reader.path == path), None)
            if idle is not None:
                self._idle.remove(idle)
        reader = VideoReader(path) if idle is None else idle
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._idle.append(reader)
            oldest = self._idle.pop(0) if len(self._idle) > _MAX_IDLE_READERS else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for reader in idle:
            reader.close()


def read_video_frames(
    pool: VideoPool, path: Path, ts: np.ndarray, *, start: float = 0.0, fps: float | None = None
) -> np.ndarray:
    """Frames number `ts` (any order, repeats allowed) of the clip that begins at `start` seconds of a file.

    `fps` is the rate at which the dataset counts; without it frames of the whole file are counted. Returns uint8
    [n, h, w, 3].
    """
    steps, where = np.unique(ts, return_inverse=True)
    with pool.reader(path) as reader:
        start, fps = (start, fps) if fps is not None else reader.numbering()
        frames = np.empty((len(ts), reader.height, reader.width, 3), np.uint8)
        for k, step in enumerate(steps.tolist()):
            try:
                frames[where == k] = reader.frame(start + step / fps, fps)
            except BadDataError as error:
                error.frame = step
                raise
    return frames
