"""Checks a dataset and its frame cache thoroughly, and lists everything that is wrong."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import rich.progress

from acrlpd.data.frames.store import FrameCache, read_manifest
from acrlpd.data.sources.source import DatasetError, EpisodeError, EpisodeSource

# Which frames are decoded: none (file headers only), the first and last of each clip, or all.
Frames = Literal["none", "ends", "all"]
_BLOCK = 32


def validate_source(source: EpisodeSource, *, frames: Frames = "ends", show_progress: bool = True) -> list[str]:
    """Reads every column, every file header and the chosen frames; returns a line per broken episode."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        results = rich.progress.track(
            threads.map(lambda index: _problem(source, index, frames), source.indices),
            "checking episodes",
            total=len(source),
            disable=not show_progress,
        )
        return [result for result in results if result]


def _problem(source: EpisodeSource, index: int, frames: Frames) -> str | None:
    try:
        length = source.check(index)
        for camera in source.cameras if frames != "none" else ():
            steps = np.arange(length) if frames == "all" else np.unique([0, length - 1])
            for start in range(0, len(steps), _BLOCK):
                source.read_frames(index, camera, steps[start : start + _BLOCK])
    except EpisodeError as error:
        return str(error)
    return None


def validate_cache(directory: Path, source: EpisodeSource) -> list[str]:
    """Compares a frame cache with its dataset and every shard with its checksum."""
    try:
        spec, _, _ = read_manifest(directory)
        cache = FrameCache(directory, source, cameras=spec.cameras, height=spec.height, width=spec.width)
    except DatasetError as error:
        return [str(error)]
    problems = cache.verify()
    cache.close()
    return problems
