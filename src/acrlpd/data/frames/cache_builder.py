"""Builds a frame cache: decodes every frame once, in parallel, and survives being killed.

Each shard is written under another name, synced and renamed, then a small record of the shard is written the
same way. A record therefore stands for a complete shard, and building again starts with the
first shard that has none. `manifest.json` appears last, from all records.
"""

import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import simplejpeg
from rich.progress import MofNCompleteColumn

from acrlpd.checksums import checksum, read_json_with_checksum, short_checksum, write_json_with_checksum
from acrlpd.console import progress
from acrlpd.cores import usable_cores
from acrlpd.data.frames.store import MANIFEST, CacheSpec, Encoding, Shard, read_manifest, resize_with_pad
from acrlpd.data.sources.source import DatasetError, EpisodeError, EpisodeSource, step_blocks
from acrlpd.files import LOCK, only_one, path_within

# A shard has at least so many bytes, and more if there would be over MAX_SHARDS: a reader keeps all shards open.
SHARD_BYTES = 256 << 20
MAX_SHARDS = 512
JPEG_QUALITY = 95
# Planning size of a JPEG frame relative to a raw one.
_JPEG_RATIO = 0.15
_PLAN = "plan.json"


def build_frame_cache(
    source: EpisodeSource,
    directory: Path,
    *,
    height: int,
    width: int,
    cameras: Sequence[str] | None = None,
    encoding: Encoding = "raw",
    workers: int | None = None,
) -> dict[int, str]:
    """Builds, or goes on building, the cache of a source; returns the episodes left out and why.

    An episode with a frame that cannot be decoded raises EpisodeError, or is left out of the cache when the
    source was opened with on_bad_episode=skip.
    """
    if min(height, width) < 1:
        raise ValueError(f"frames of {height}x{width} cannot be cached; height and width must be at least 1")
    unknown = [camera for camera in cameras or () if camera not in source.cameras]
    if unknown:
        raise ValueError(f"{source.root} has no camera {unknown[0]!r}; it has {', '.join(source.cameras)}")
    for camera in source.cameras if cameras is None else cameras:
        path_within(directory, camera, f"the name of a camera of {source.root}")
    spec = CacheSpec(
        source=source.identity,
        cameras=list(source.cameras if cameras is None else cameras),
        height=height,
        width=width,
        encoding=encoding,
        jpeg_quality=JPEG_QUALITY if encoding == "jpeg" else None,
    )
    directory.mkdir(parents=True, exist_ok=True)
    with only_one(directory, "building this cache", DatasetError):
        plan = _begun_or_new_plan(directory, source, spec)
        if (directory / MANIFEST).is_file():
            skipped = read_manifest(directory)[2]
        else:
            skipped = _Builder(source, spec, directory).build(plan, workers or usable_cores())
    return {index: reason for index, reason in skipped.items() if index in source.indices}


ShardPlan = tuple[str, str, list[int]]  # file, camera, dataset indices of its episodes


def _plan(source: EpisodeSource, spec: CacheSpec) -> list[ShardPlan]:
    """Cuts the episodes of each camera, in order, into shards; only the last one may be smaller than the limit."""
    lengths = source.lengths
    frame = spec.frame_bytes * (_JPEG_RATIO if spec.encoding == "jpeg" else 1.0)
    total = float(lengths.sum()) * frame * len(spec.cameras)
    limit = max(SHARD_BYTES, total / (MAX_SHARDS - len(spec.cameras)))
    groups: list[list[int]] = [[]]
    filled = 0.0
    for index, length in zip(source.indices, lengths.tolist(), strict=True):
        if filled >= limit:
            groups.append([])
            filled = 0.0
        groups[-1].append(index)
        filled += length * frame
    return [(f"{camera}/{k:05d}.frames", camera, group) for camera in spec.cameras for k, group in enumerate(groups)]


def _begun_or_new_plan(directory: Path, source: EpisodeSource, spec: CacheSpec) -> list[ShardPlan]:
    """The plan of the cache that was begun in the directory, or a new plan. Refuses the directory of another cache.

    A begun plan may hold episodes that the source now skips; they are left out of the shards still to come.
    """
    path = directory / _PLAN
    if path.is_file():
        begun = _read_record(path)
        if begun["spec"] != dataclasses.asdict(spec):
            raise DatasetError(
                f"{directory}: holds a cache of another dataset, size or encoding; "
                "choose an empty directory or delete this one"
            )
        lost = sorted(set(source.indices).difference(*(episodes for _, _, episodes in begun["shards"])))
        if lost:
            raise DatasetError(
                f"{directory}: holds a cache that was begun without the episodes {lost}; go on with "
                "on_bad_episode=skip, or choose an empty directory"
            )
        return begun["shards"]
    if any(p.name != LOCK for p in directory.iterdir()):
        raise DatasetError(f"{directory}: not empty and not a frame cache; choose an empty directory")
    plan = _plan(source, spec)
    write_json_with_checksum(path, {"spec": dataclasses.asdict(spec), "shards": plan})
    return plan


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return read_json_with_checksum(path)
    except ValueError as error:
        raise DatasetError(f"{path}: {error}; delete the directory of the cache and build it again") from None


class _Builder:
    """Writes the shards of a plan and, when all are there, the manifest."""

    def __init__(self, source: EpisodeSource, spec: CacheSpec, directory: Path) -> None:
        self._source = source
        self._spec = spec
        self._directory = directory
        self._lengths = dict(zip(source.indices, source.lengths.tolist(), strict=True))
        self._stop = threading.Event()  # set when a shard failed, so that the other shards stop
        self._progress = progress(MofNCompleteColumn())
        self._task = self._progress.add_task("decoding frames", total=sum(self._lengths.values()) * len(spec.cameras))

    def build(self, plan: list[ShardPlan], workers: int | None) -> dict[int, str]:
        """Returns the episodes left out and why."""
        skipped: dict[int, str] = {}
        with self._progress, concurrent.futures.ThreadPoolExecutor(workers) as threads:
            futures = [threads.submit(self._finish_shard, *shard) for shard in plan]
            try:
                for future in concurrent.futures.as_completed(futures):
                    skipped |= future.result()
            except BaseException:
                self._stop.set()
                threads.shutdown(cancel_futures=True)
                raise
        records = [(self._directory / file).with_suffix(".json") for file, _, _ in plan]
        shards = [_read_record(record)["shard"] for record in records]
        manifest = {"spec": dataclasses.asdict(self._spec), "shards": shards, "skipped": dict(sorted(skipped.items()))}
        write_json_with_checksum(self._directory / MANIFEST, manifest)
        return skipped

    def _finish_shard(self, file: str, camera: str, planned: list[int]) -> dict[int, str]:
        """Writes a shard and its record unless they are there; returns the episodes left out and why."""
        left_out = {episode.index: episode.reason for episode in self._source.skipped if episode.index in planned}
        indices = [index for index in planned if index not in left_out]
        path, record = self._directory / file, (self._directory / file).with_suffix(".json")
        if record.is_file():
            done = _read_record(record)
            if path.is_file() and path.stat().st_size == done["shard"]["bytes"]:
                self._progress.advance(self._task, sum(self._lengths[index] for index in indices))
                return left_out | {int(index): reason for index, reason in done["skipped"].items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as stream:
            episodes, skipped, tables = self._write_episodes(camera, indices, stream)
            skipped |= left_out
            stream.write(tables)
            stream.flush()
            os.fsync(stream.fileno())
        shard = Shard(file, camera, episodes, partial.stat().st_size, checksum(tables))
        partial.replace(path)
        write_json_with_checksum(record, {"shard": dataclasses.asdict(shard), "skipped": skipped})
        return skipped

    def _write_episodes(
        self, camera: str, indices: list[int], stream: BinaryIO
    ) -> tuple[list[tuple[int, int, int]], dict[int, str], bytes]:
        """(dataset index, first frame, length) of what was written; what was left out and why; the shard's tables."""
        episodes: list[tuple[int, int, int]] = []
        skipped: dict[int, str] = {}
        ends: list[int] = []  # byte at which each frame ends
        checksums: list[int] = []
        for index in indices:
            frames, start = len(ends), stream.tell()
            try:
                for content in self._encoded_frames(camera, index):
                    stream.write(content)
                    ends.append((ends[-1] if ends else 0) + len(content))
                    checksums.append(short_checksum(content))
            except EpisodeError as error:
                if self._source.on_bad_episode == "error":
                    raise
                skipped[index] = str(error)
                self._progress.advance(self._task, self._lengths[index] - (len(ends) - frames))
                del ends[frames:], checksums[frames:]
                stream.seek(start)
                stream.truncate()
                continue
            episodes.append((index, frames, self._lengths[index]))
        offsets = [0, *ends] if self._spec.encoding == "jpeg" else []
        return episodes, skipped, np.array([*offsets, *checksums], np.uint64).tobytes()

    def _encoded_frames(self, camera: str, index: int) -> Iterator[bytes]:
        """The frames of one episode as the cache stores them."""
        for ts in step_blocks(self._lengths[index]):
            if self._stop.is_set():
                raise concurrent.futures.CancelledError
            frames = self._source.read_frames(index, camera, ts)
            for frame in resize_with_pad(frames, self._spec.height, self._spec.width):
                if self._spec.encoding == "jpeg":
                    yield simplejpeg.encode_jpeg(np.ascontiguousarray(frame), quality=self._spec.jpeg_quality)
                else:
                    yield frame.tobytes()
            self._progress.advance(self._task, len(ts))
