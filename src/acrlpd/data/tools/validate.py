"""Checks a dataset and its frame cache thoroughly, and lists everything that is wrong."""

from pathlib import Path
from typing import Literal

import numpy as np
import rich.progress
from rich.console import Console

from acrlpd.data.frames.store import FrameCache, read_manifest
from acrlpd.data.sources.source import DatasetError, EpisodeSource, check_episodes, step_blocks

# Which frames are decoded: none (file headers only), the first and last of each clip, or all.
Frames = Literal["none", "ends", "all"]


def validate_source(source: EpisodeSource, *, frames: Frames = "ends") -> list[str]:
    """Reads every column, every file header and the chosen frames; returns a line per broken episode."""

    def check(index: int) -> None:
        length = source.check(index)
        ends = [np.unique([0, length - 1])] if frames == "ends" else []
        for camera in source.cameras:
            for ts in step_blocks(length) if frames == "all" else ends:
                source.read_frames(index, camera, ts)

    results = rich.progress.track(
        check_episodes(source, check), "checking episodes", total=len(source), console=Console(stderr=True)
    )
    return [problem for _, problem in results if problem]


def validate_cache(directory: Path, source: EpisodeSource) -> list[str]:
    """Compares a frame cache with its dataset and every shard with its checksum."""
    try:
        spec, _, _ = read_manifest(directory)
        cache = FrameCache(directory, source, spec.cameras, spec.height, spec.width)
    except DatasetError as error:
        return [str(error)]
    problems = cache.verify()
    cache.close()
    return problems
