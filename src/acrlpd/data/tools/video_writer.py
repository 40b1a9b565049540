"""Encodes frames into the video files of a LeRobot v3.0 dataset, which hold many clips each."""

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np

from acrlpd.data.sources.source import DatasetError

CHUNKS_SIZE = 1000
# The place of a file below the folder of its kind, as meta/info.json describes it.
FILE_NAME = "chunk-{chunk_index:03d}/file-{file_index:03d}"
# Settings of lerobot: a keyframe every second frame makes random access cheap.
_OPTIONS = {
    "libsvtav1": {"g": "2", "crf": "30", "preset": "10"},
    "h264": {"g": "2", "crf": "23", "bf": "0", "preset": "veryfast"},
}
_CODEC_NAMES = {"libsvtav1": "av1", "h264": "h264"}


def file_indices(number: int) -> dict[str, int]:
    """The indices by which a dataset names its file with this number."""
    chunk, file = divmod(number, CHUNKS_SIZE)
    return {"chunk_index": chunk, "file_index": file}


def make_file_path(folder: Path, number: int, suffix: str) -> Path:
    """The path of a file with this number, in a directory that exists."""
    path = folder / (FILE_NAME.format(**file_indices(number)) + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class VideoWriter:
    """The video files of one camera."""

    def __init__(self, root: Path, camera: str, shape: tuple[int, ...], fps: float, codec: str) -> None:
        if codec not in _OPTIONS:
            raise DatasetError(f"unknown video codec {codec!r}; choose one of {sorted(_OPTIONS)}")
        if shape[0] % 2 or shape[1] % 2:
            raise DatasetError(f"camera {camera!r}: {shape[0]}x{shape[1]} frames; video needs even sizes")
        self._folder = root / "videos" / camera
        self._camera = camera
        self._shape = shape
        self._fps = fps
        self._codec = codec
        self._full_files = 0
        self._container: Any = None
        self._frames = 0  # in the current file
        self._clip_start = 0
        self._bytes = 0  # of the current file, so far

    @property
    def info(self) -> dict[str, Any]:
        """What meta/info.json says about the encoding."""
        return {
            "video.height": self._shape[0],
            "video.width": self._shape[1],
            "video.codec": _CODEC_NAMES[self._codec],
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": self._fps,
            "video.channels": 3,
            "has_audio": False,
        }

    def write(self, frame: np.ndarray) -> None:
        if frame.shape != self._shape or frame.dtype != np.uint8:
            raise ValueError(
                f"{self._camera}: a frame is {frame.dtype} {list(frame.shape)}, declared uint8 {list(self._shape)}"
            )
        if self._container is None:
            self._open()
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture.pts = self._frames
        self._mux(self._stream.encode(picture))
        self._frames += 1

    def end_clip(self, max_bytes: int) -> dict[str, Any]:
        """Ends the episode's clip and says where it lies; a file of `max_bytes` takes no further clip."""
        location = {
            **file_indices(self._full_files),
            "from_timestamp": self._clip_start / self._fps,
            "to_timestamp": self._frames / self._fps,
        }
        self._clip_start = self._frames
        if self._bytes >= max_bytes:
            self.close()
        return {f"videos/{self._camera}/{name}": value for name, value in location.items()}

    def drop_clip(self) -> None:
        """Forgets the frames since the last clip; they stay in the file, where nothing refers to them."""
        self._clip_start = self._frames

    def close(self) -> None:
        if self._container is None:
            return
        self._mux(self._stream.encode(None))
        self._container.close()
        self._container = None
        self._frames = self._clip_start = self._bytes = 0
        self._full_files += 1

    def _mux(self, packets: list[Any]) -> None:
        self._bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)

    def _open(self) -> None:
        path = make_file_path(self._folder, self._full_files, ".mp4")
        os.environ.setdefault("SVT_LOG", "1")  # otherwise the AV1 encoder prints its settings for every file
        self._container = av.open(str(path), "w")
        rate = Fraction(self._fps).limit_denominator(1001)
        try:
            self._stream = self._container.add_stream(self._codec, rate=rate, options=_OPTIONS[self._codec])
        except (av.error.FFmpegError, ValueError) as error:
            raise DatasetError(f"this build of PyAV cannot encode {self._codec!r} ({error})") from None
        self._stream.height, self._stream.width = self._shape[:2]
        self._stream.pix_fmt = "yuv420p"
