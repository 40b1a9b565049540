"""Builds a frame cache: decodes every frame once, in parallel, and survives being killed.

Each shard is written under another name, synced and renamed, then a small record with its checksum is
written the same way. A record therefore stands for a complete shard, and building again starts with the
first shard that has none. `manifest.json` appears last, from all records.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import rich.progress
import simplejpeg

from acrlpd.data.frames.resize import resize_with_pad
from acrlpd.data.frames.store import MANIFEST, CacheSpec, Encoding, Shard, read_manifest, sha256_of
from acrlpd.data.sources.source import DatasetError, EpisodeError, EpisodeSource
from acrlpd.files import LOCK, only_one, write_text_atomically

# A shard has at least so many bytes, and more if there would be over MAX_SHARDS: a reader keeps all shards open.
SHARD_BYTES = 256 << 20
MAX_SHARDS = 512
JPEG_QUALITY = 95
# Planning size of a JPEG frame relative to a raw one.
_JPEG_RATIO = 0.15
# Frames that a thread decodes at once: bounds memory at (threads x 32 frames of the camera's size).
_DECODE_BLOCK = 32
_PLAN = "plan.json"


def build_frame_cache(
    source: EpisodeSource,
    directory: Path,
    *,
    height: int,
    width: int,
    cameras: tuple[str, ...] | None = None,
    encoding: Encoding = "raw",
    workers: int | None = None,
    show_progress: bool = True,
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
    spec = CacheSpec(
        source=source.identity,
        cameras=source.cameras if cameras is None else cameras,
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
            skipped = _build(source, spec, plan, directory, workers or os.cpu_count() or 1, show_progress)
    return {index: reason for index, reason in skipped.items() if index in source.indices}


ShardPlan = tuple[str, str, tuple[int, ...]]  # file, camera, dataset indices of its episodes


def _plan(source: EpisodeSource, spec: CacheSpec) -> list[ShardPlan]:
    """Cuts each camera's episodes, in order, into shards."""
    lengths = source.lengths
    frame = spec.frame_bytes * (_JPEG_RATIO if spec.encoding == "jpeg" else 1.0)
    total = float(lengths.sum()) * frame * len(spec.cameras)
    limit = max(SHARD_BYTES, total / (MAX_SHARDS - len(spec.cameras)))
    shards: list[ShardPlan] = []
    for camera in spec.cameras:
        groups: list[list[int]] = [[]]
        filled = 0.0
        for index, length in zip(source.indices, lengths.tolist(), strict=True):
            if groups[-1] and filled + length * frame > limit:
                groups.append([])
                filled = 0.0
            groups[-1].append(index)
            filled += length * frame
        folder = camera.replace("/", "_")
        shards += [(f"{folder}/{k:05d}.frames", camera, tuple(group)) for k, group in enumerate(groups)]
    return shards


def _begun_or_new_plan(directory: Path, source: EpisodeSource, spec: CacheSpec) -> list[ShardPlan]:
    """The plan of the cache that was begun in the directory, or a new plan. Refuses the directory of another cache.

    A begun plan may hold episodes that the source now skips; they are left out of the shards still to come.
    """
    path = directory / _PLAN
    if path.is_file():
        begun = json.loads(path.read_text())
        if begun["spec"] != spec.to_json():
            raise DatasetError(
                f"{directory}: holds a cache of another dataset, size or encoding; "
                "choose an empty directory or delete this one"
            )
        plan = [(file, camera, tuple(episodes)) for file, camera, episodes in begun["shards"]]
        lost = sorted(set(source.indices).difference(*(episodes for _, _, episodes in plan)))
        if lost:
            raise DatasetError(
                f"{directory}: holds a cache that was begun without the episodes {lost}; go on with "
                "on_bad_episode=skip, or choose an empty directory"
            )
        return plan
    if any(p.name != LOCK for p in directory.iterdir()):
        raise DatasetError(f"{directory}: not empty and not a frame cache; choose an empty directory")
    plan = _plan(source, spec)
    shards = [[file, camera, list(episodes)] for file, camera, episodes in plan]
    write_text_atomically(path, json.dumps({"spec": spec.to_json(), "shards": shards}, indent=1))
    return plan


@dataclasses.dataclass(frozen=True)
class _Build:
    """What all shards of one build share."""

    source: EpisodeSource
    spec: CacheSpec
    directory: Path
    lengths: dict[int, int]  # dataset index -> steps
    left_out: dict[int, str]  # dataset index -> why the source skips it
    advance: Callable[[int], None]  # reports frames done
    stop: threading.Event  # set when a shard failed, so that the other shards stop


def _build(
    source: EpisodeSource,
    spec: CacheSpec,
    plan: list[ShardPlan],
    directory: Path,
    workers: int,
    show_progress: bool,
) -> dict[int, str]:
    lengths = dict(zip(source.indices, source.lengths.tolist(), strict=True))
    progress = rich.progress.Progress(
        "[progress.description]{task.description}",
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        disable=not show_progress,
    )
    skipped: dict[int, str] = {}
    with progress, concurrent.futures.ThreadPoolExecutor(workers) as threads:
        task = progress.add_task("decoding frames", total=sum(lengths.values()) * len(spec.cameras))
        advance = functools.partial(progress.advance, task)
        left_out = {episode.index: episode.reason for episode in source.skipped}
        build = _Build(source, spec, directory, lengths, left_out, advance, threading.Event())
        futures = [threads.submit(_finish_shard, build, shard) for shard in plan]
        try:
            for future in concurrent.futures.as_completed(futures):
                skipped |= future.result()
        except BaseException:
            build.stop.set()
            threads.shutdown(cancel_futures=True)
            raise
    shards = [json.loads(_record_path(directory, file).read_text())["shard"] for file, _, _ in plan]
    reasons = {str(index): reason for index, reason in sorted(skipped.items())}
    write_text_atomically(
        directory / MANIFEST, json.dumps({"spec": spec.to_json(), "shards": shards, "skipped": reasons}, indent=1)
    )
    return skipped


def _record_path(directory: Path, file: str) -> Path:
    return (directory / file).with_suffix(".json")


def _finish_shard(build: _Build, plan: ShardPlan) -> dict[int, str]:
    """Writes a shard and its record unless they are there; returns the episodes left out and why."""
    file, camera, planned = plan
    indices = tuple(index for index in planned if index not in build.left_out)
    left_out = {index: build.left_out[index] for index in planned if index in build.left_out}
    path, record = build.directory / file, _record_path(build.directory, file)
    if record.is_file():
        done = json.loads(record.read_text())
        if path.is_file() and path.stat().st_size == done["shard"]["bytes"]:
            build.advance(sum(build.lengths[index] for index in indices))
            return left_out | {int(index): reason for index, reason in done["skipped"].items()}
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        episodes, skipped = _write_episodes(build, camera, indices, stream)
        skipped |= left_out
        stream.flush()
        os.fsync(stream.fileno())
    shard = Shard(file, camera, tuple(episodes), partial.stat().st_size, sha256_of(partial))
    partial.replace(path)
    reasons = {str(index): reason for index, reason in skipped.items()}
    write_text_atomically(record, json.dumps({"shard": shard.to_json(), "skipped": reasons}, indent=1))
    return skipped


def _write_episodes(
    build: _Build, camera: str, indices: tuple[int, ...], stream: BinaryIO
) -> tuple[list[tuple[int, int, int]], dict[int, str]]:
    """Returns (dataset index, first frame, length) of what was written, and what was left out and why."""
    episodes: list[tuple[int, int, int]] = []
    skipped: dict[int, str] = {}
    ends: list[int] = []  # byte at which each frame ends
    for index in indices:
        frames, start = len(ends), stream.tell()
        try:
            for size in _write_frames(build, camera, index, stream):
                ends.append((ends[-1] if ends else 0) + size)
        except EpisodeError as error:
            if build.source.on_bad_episode == "error":
                raise
            skipped[index] = str(error)
            build.advance(build.lengths[index] - (len(ends) - frames))
            del ends[frames:]
            stream.seek(start)
            stream.truncate()
            continue
        episodes.append((index, frames, build.lengths[index]))
    if build.spec.encoding == "jpeg":
        stream.write(np.array([0, *ends], np.uint64).tobytes())
    return episodes, skipped


def _write_frames(build: _Build, camera: str, index: int, stream: BinaryIO) -> Iterator[int]:
    """Writes the frames of one episode; yields the bytes of each."""
    spec, length = build.spec, build.lengths[index]
    for start in range(0, length, _DECODE_BLOCK):
        if build.stop.is_set():
            raise concurrent.futures.CancelledError
        ts = np.arange(start, min(start + _DECODE_BLOCK, length))
        frames = build.source.read_frames(index, camera, ts)
        for frame in resize_with_pad(frames, spec.height, spec.width):
            encoded = (
                frame.tobytes()
                if spec.encoding == "raw"
                else simplejpeg.encode_jpeg(np.ascontiguousarray(frame), quality=spec.jpeg_quality)
            )
            yield stream.write(encoded)
        build.advance(len(ts))
