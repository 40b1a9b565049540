"""Frames at the model's resolution for a loader: from a frame cache, or decoded while training runs.

A frame cache is a directory: `manifest.json` says which dataset it was made from, how frames were resized and encoded,
and the size and checksum of every shard; `<camera>/<number>.frames` are the shards. A raw shard has frames of a fixed
stride, each read with one pread; a JPEG shard has the encoded frames followed by the table of their offsets.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg

from acrlpd.data.frames.decoded import DecodedFrames, FrameStore, MemoryPool, require_steps
from acrlpd.data.sources.source import DatasetError, EpisodeSource

Encoding = Literal["raw", "jpeg"]
MANIFEST = "manifest.json"
# The name of what `resize_with_pad` does: a cache that was resized in another way is refused.
RESIZE = "resize_with_pad bilinear"
VERSION = 1


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
    sha256: str


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
        self._files = [os.open(directory / shard.file, os.O_RDONLY) for shard in self.shards]
        self._offsets = [self._jpeg_offsets(k) for k in range(len(self.shards))]

    def read_into(self, camera: str, episodes: np.ndarray, ts: np.ndarray, out: np.ndarray) -> None:
        if out.shape != (len(ts), self.height, self.width, 3) or out.dtype != np.uint8:
            raise ValueError(
                f"out must be uint8 [{len(ts)}, {self.height}, {self.width}, 3], found {out.dtype} {list(out.shape)}"
            )
        require_steps(self._lengths, episodes, ts)
        shards, first = self._placed[camera]
        read = self._read_raw if self.spec.encoding == "raw" else self._read_jpeg
        places = zip(shards[episodes].tolist(), (first[episodes] + ts).tolist(), strict=True)
        for k, (shard, frame) in enumerate(places):
            read(shard, frame, out[k])

    def verify(self) -> list[str]:
        """Compares every shard with its checksum; returns what is wrong."""
        problems = []
        for shard in self.shards:
            path = self.directory / shard.file
            found = sha256_of(path)
            if found != shard.sha256:
                problems.append(f"{path}: checksum {found[:12]}.. differs from the manifest's {shard.sha256[:12]}..")
        return problems

    def close(self) -> None:
        files, self._files = self._files, []
        for file in files:
            os.close(file)
        super().close()

    def _read_raw(self, shard: int, frame: int, out: np.ndarray) -> None:
        size = self.spec.frame_bytes
        if os.preadv(self._files[shard], [out.data], frame * size) != size:
            raise DatasetError(f"{self.directory / self.shards[shard].file}: truncated; build the cache again")

    def _read_jpeg(self, shard: int, frame: int, out: np.ndarray) -> None:
        start, end = self._offsets[shard][frame], self._offsets[shard][frame + 1]
        data = os.pread(self._files[shard], int(end - start), int(start))
        try:
            simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=out)
        except ValueError as error:
            raise DatasetError(
                f"{self.directory / self.shards[shard].file}: frame {frame} is damaged ({error}); "
                "delete the cache and build it again"
            ) from None

    def _jpeg_offsets(self, k: int) -> np.ndarray:
        if self.spec.encoding == "raw":
            return np.zeros(0, np.uint64)
        shard = self.shards[k]
        size = (sum(length for _, _, length in shard.episodes) + 1) * 8
        table = os.pread(self._files[k], size, shard.bytes - size)
        return np.frombuffer(table, np.uint64)

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
            path = self.directory / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise DatasetError(
                    f"{path}: {found}, the manifest says {shard.bytes} bytes; delete the cache and build it again"
                )


def read_manifest(directory: Path) -> tuple[CacheSpec, list[Shard], dict[int, str]]:
    """(spec, shards, skipped episodes: dataset index -> reason) of a finished cache."""
    path = directory / MANIFEST
    if not path.is_file():
        raise DatasetError(
            f"{directory}: no finished frame cache; build it, or go on building it, with "
            f"`acrlpd data cache <dataset> {directory}`"
        )
    try:
        data = json.loads(path.read_text())
        spec, shards = CacheSpec(**data["spec"]), [Shard(**s) for s in data["shards"]]
        return spec, shards, {int(index): reason for index, reason in data["skipped"].items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path}: damaged ({error!r}); delete the cache and build it again") from None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
