"""Joins datasets of one task into one LeRobot dataset, with what a policy reads and how each episode ends."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from acrlpd.data.pipeline.returns import INTERVENTION_COLUMNS
from acrlpd.data.sources.source import DatasetError, EpisodeSource, Feature
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.files import new_directory

SUCCESS = "next.success"
_HUMAN = INTERVENTION_COLUMNS[0]


@dataclasses.dataclass(frozen=True)
class Part:
    """Episodes of one source, and which of their steps succeed."""

    source: EpisodeSource
    success: Sequence[np.ndarray]  # bool [length] for each episode


def join_datasets(
    output: Path, parts: Sequence[Part], *, columns: Sequence[str], cameras: Sequence[str], default_prompt: str | None
) -> None:
    """Writes the episodes of all parts, in their order, as a LeRobot v3.0 dataset.

    The dataset has the named columns and cameras, and says which steps succeed and which a human chose. It appears
    under `output` when it is complete. `default_prompt` is the task of episodes that name none.
    """
    first = parts[0].source
    features = {name: first.features[name] for name in columns}
    features |= {name: Feature("video", first.features[name].shape) for name in cameras}
    for part in parts[1:]:
        require_equal_shapes(features, part.source.features, (str(first.root), str(part.source.root)))
    features |= {SUCCESS: Feature("bool", ()), _HUMAN: Feature("bool", ())}
    with (
        new_directory(output) as partial,
        LeRobotWriter(partial, fps=first.fps, features=features, codec="h264") as writer,
    ):
        for part in parts:
            for i, success in enumerate(part.success):
                _copy_episode(part.source, i, success, writer, columns, cameras, default_prompt)


def require_equal_shapes(wanted: Mapping[str, Feature], found: Mapping[str, Feature], places: tuple[str, str]) -> None:
    """Refuses episodes that do not have the `wanted` columns and cameras; `places` say where both are from."""
    for name, feature in wanted.items():
        shape = found[name].shape if name in found else None
        if shape != feature.shape:
            fix = ". Set env.image_size to {} {}".format(*feature.shape) if feature.is_camera else ""
            raise DatasetError(
                f"{name} has the shape {feature.shape} in {places[0]} and {shape} in {places[1]}: one dataset cannot "
                f"hold both{fix}"
            )


def _copy_episode(
    source: EpisodeSource,
    i: int,
    success: np.ndarray,
    writer: LeRobotWriter,
    columns: Sequence[str],
    cameras: Sequence[str],
    default_prompt: str | None,
) -> None:
    episode = source.episode(i)
    prompt = episode.prompt or default_prompt
    if prompt is None:
        raise DatasetError(f"{source.root}: episode {episode.index} names no task; set data.default_prompt")
    marks = (episode.columns[name] for name in INTERVENTION_COLUMNS if name in episode.columns)
    human = next(marks, np.zeros(episode.length, bool))
    values = {name: episode.columns[name] for name in columns} | {SUCCESS: success, _HUMAN: human.astype(bool)}
    writer.add_episode(episode, values, cameras, prompt)
