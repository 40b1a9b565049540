"""Frames at the model's resolution: how they are resized, how a loader reads them, and the frame cache.

A frame cache is a directory: `manifest.json` says which dataset it was made from, how frames were resized and encoded,
and the size of every shard; `<camera>/<number>.frames` are the shards. A shard has the frames, raw ones of a fixed
stride or JPEG, followed by two tables: where each JPEG begins, and the checksum of each frame. A process compares each
frame with its checksum when it first reads the frame, so the check reads nothing twice and delays nothing.
"""

import abc
import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg
from PIL import Image

from acrlpd.checksums import checksum, read_json_with_checksum, short_checksum
from acrlpd.data.sources.source import DatasetError, EpisodeSource
from acrlpd.files import path_within

Encoding = Literal["raw", "jpeg"]
MANIFEST = "manifest.json"
# The name of what `resize_with_pad` does: a cache that was resized in another way is refused.
RESIZE = "resize_with_pad bilinear"
VERSION = 1
_REPAIR = f"delete this file and {MANIFEST}, then run `acrlpd data cache` again, which makes only what is missing"


def resize_with_pad(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Fits uint8 images [..., h, w, 3] into height x width without distorting them.

    Pixel-equal to what openpi's client sends to its policy server, so a policy trained on our frames
    sees the same pixels when it is served. An image that has the size already is returned as it is.
    """
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] != 3:
        raise ValueError(f"images must be uint8 [..., h, w, 3], found {images.dtype} {list(images.shape)}")
    if images.shape[-3:-1] == (height, width):
        return images
    *batch_shape, h, w, _ = images.shape
    ratio = max(w / width, h / height)
    new_h, new_w = int(h / ratio), int(w / ratio)
    top, left = (height - new_h) // 2, (width - new_w) // 2
    resized = np.zeros((*batch_shape, height, width, 3), np.uint8)
    for k in np.ndindex(*batch_shape):
        # One axis after the other: Pillow versions order (and so round) a resize of both axes differently.
        narrow = Image.fromarray(images[k]).resize((new_w, h), Image.Resampling.BILINEAR)
        fitted = narrow.resize((new_w, new_h), Image.Resampling.BILINEAR)
        resized[k][top : top + new_h, left : left + new_w] = np.asarray(fitted)
    return resized


class FrameStore(abc.ABC):
    """Frames at the model's resolution: from a frame cache, from the decoder, or from a memory pool.

    `acrlpd.data.frames.decoded.open_frame_store` makes one.
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


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What decides the content of a cache; equal specs make equal caches."""

    source: str  # EpisodeSource.identity
    cameras: list[str]
    height: int
    width: int
    encoding: Encoding
    jpeg_quality: int | None = None
    resize: str = RESIZE
    version: int = VERSION

    @property
    def frame_bytes(self) -> int:
        """Size of one raw frame."""
        return self.height * self.width * 3


@dataclasses.dataclass(frozen=True)
class Shard:
    """A finished shard: consecutive episodes of one camera."""

    file: str  # below the cache directory
    camera: str
    episodes: list[tuple[int, int, int]]  # (dataset index, first frame in the shard, length)
    bytes: int
    checksum: str  # of the tables behind the frames


class FrameCache(FrameStore):
    """The frames of a finished cache: shards stay open, a frame is one pread into the caller's buffer."""

    def __init__(self, directory: Path, source: EpisodeSource, cameras: Sequence[str], height: int, width: int) -> None:
        self.spec, self.shards, skipped = read_manifest(directory)
        left_out = {index: reason for index, reason in skipped.items() if index in source.indices}
        super().__init__(source.without(left_out), cameras, height, width)
        self.directory = directory
        self._require_match()
        self._require_shards()
        if left_out and source.on_bad_episode == "error":
            raise DatasetError(
                f"{directory}: {len(left_out)} episodes could not be decoded and are not in the cache (the first: "
                f"{next(iter(left_out.values()))}); train with on_bad_episode=skip to go without them"
            )
        self._place()
        # File objects, which are closed with this store also where an error leaves the store half made.
        self._files = [(directory / shard.file).open("rb", buffering=0) for shard in self.shards]
        self._tables = [self._read_tables(k) for k in range(len(self.shards))]
        # Which frames of each shard were compared with their checksum. Two threads may compare the same frame.
        self._checked = [bytearray(len(checksums)) for _, checksums in self._tables]

    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        if out.shape != (len(ts), self.height, self.width, 3) or out.dtype != np.uint8:
            raise ValueError(
                f"out must be uint8 [{len(ts)}, {self.height}, {self.width}, 3], found {out.dtype} {list(out.shape)}"
            )
        require_steps(self._lengths, episodes, ts)
        shards, first = self._placed[camera]
        places = zip(shards[episodes].tolist(), (first[episodes] + ts).tolist(), strict=True)
        for k, (shard, frame) in enumerate(places):
            self._read_frame(shard, frame, out[k])

    def verify(self) -> list[str]:
        """Compares every frame of every shard with its checksum; returns the first problem of each damaged shard."""

        def problem(shard: int) -> str | None:
            try:
                for frame, size in enumerate(np.diff(self._tables[shard][0]).tolist()):
                    self._checked[shard][frame] = False
                    self._read_bytes(shard, frame, memoryview(bytearray(size)))
            except DatasetError as error:
                return str(error)
            return None

        with ThreadPoolExecutor() as threads:
            return [found for found in threads.map(problem, range(len(self.shards))) if found]

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()

    def _read_frame(self, shard: int, frame: int, out: np.ndarray) -> None:
        if self.spec.encoding == "raw":
            self._read_bytes(shard, frame, out.data)
            return
        start, end = self._tables[shard][0][frame : frame + 2].tolist()
        jpeg = bytearray(end - start)
        self._read_bytes(shard, frame, memoryview(jpeg))
        simplejpeg.decode_jpeg(jpeg, colorspace="RGB", buffer=out)

    def _read_bytes(self, shard: int, frame: int, out: memoryview) -> None:
        """Reads a frame as it is stored. The first time, the bytes are compared with the checksum of the frame."""
        read = os.preadv(self._files[shard].fileno(), [out], int(self._tables[shard][0][frame]))
        if read != out.nbytes:
            raise self._damaged(shard, f"truncated, it ends before the end of frame {frame}")
        if self._checked[shard][frame]:
            return
        if short_checksum(out) != self._tables[shard][1][frame]:
            raise self._damaged(shard, f"damaged, frame {frame} does not match its checksum")
        self._checked[shard][frame] = True

    def _read_tables(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the frames of a shard begin and where the last one ends, int64 [n + 1]; their checksums, uint64 [n]."""
        shard, is_raw = self.shards[k], self.spec.encoding == "raw"
        count = sum(length for _, _, length in shard.episodes)
        size = 8 * (count if is_raw else 2 * count + 1)
        tables = os.pread(self._files[k].fileno(), size, shard.bytes - size)
        if checksum(tables) != shard.checksum:
            raise self._damaged(k, "damaged, the table behind the frames does not match its checksum")
        numbers = np.frombuffer(tables, np.uint64)
        starts = self.spec.frame_bytes * np.arange(count + 1) if is_raw else numbers[: count + 1].astype(np.int64)
        return starts, numbers[-count:] if count else numbers[:0]

    def _damaged(self, shard: int, problem: str) -> DatasetError:
        return DatasetError(f"{self.directory / self.shards[shard].file}: {problem}; {_REPAIR}")

    def _place(self) -> None:
        """Finds the shard, and the first frame in the shard, of every episode and camera."""
        position = {index: i for i, index in enumerate(self.source.indices)}
        self._lengths = self.source.lengths
        self._placed = {
            camera: (np.full(len(position), -1, np.int64), np.zeros(len(position), np.int64)) for camera in self.cameras
        }
        for k, shard in enumerate(self.shards):
            if shard.camera not in self._placed:
                continue
            shards, first = self._placed[shard.camera]
            for index, start, _ in shard.episodes:
                if index in position:
                    shards[position[index]], first[position[index]] = k, start
        for camera, (shards, _) in self._placed.items():
            lost = np.flatnonzero(shards < 0)
            if lost.size:
                raise DatasetError(
                    f"{self.directory}: episode {self.source.indices[lost[0]]} of camera {camera!r} is not "
                    "in the cache; build it again for this dataset"
                )

    def _require_match(self) -> None:
        spec, rebuild = self.spec, "build it again with `acrlpd data cache` into an empty directory"
        if spec.source != self.source.identity:
            raise DatasetError(f"{self.directory}: made from another dataset than {self.source.root}; {rebuild}")
        if (spec.height, spec.width) != (self.height, self.width):
            raise DatasetError(
                f"{self.directory}: frames are {spec.height}x{spec.width}, the model wants "
                f"{self.height}x{self.width}; {rebuild}, with --height {self.height} --width {self.width}"
            )
        if (spec.resize, spec.version) != (RESIZE, VERSION):
            raise DatasetError(f"{self.directory}: made by another version ({spec.resize!r}); {rebuild}")
        missing = [camera for camera in self.cameras if camera not in spec.cameras]
        if missing:
            raise DatasetError(f"{self.directory}: no camera {missing[0]!r}, it has {spec.cameras}; {rebuild}")

    def _require_shards(self) -> None:
        for shard in self.shards:
            path = path_within(self.directory, shard.file, f"a file of {self.directory / MANIFEST}")
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise DatasetError(f"{path}: {found}, the manifest says {shard.bytes} bytes; {_REPAIR}")


def read_manifest(directory: Path) -> tuple[CacheSpec, list[Shard], dict[int, str]]:
    """(spec, shards, skipped episodes: dataset index -> reason) of a finished cache."""
    path = directory / MANIFEST
    if not path.is_file():
        raise DatasetError(
            f"{directory}: no finished frame cache; build it, or go on building it, with "
            f"`acrlpd data cache <dataset> {directory}`"
        )
    try:
        data = read_json_with_checksum(path)
        spec, shards = CacheSpec(**data["spec"]), [Shard(**s) for s in data["shards"]]
        return spec, shards, {int(index): reason for index, reason in data["skipped"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{path}: damaged ({error!r}); delete the cache and build it again") from None
