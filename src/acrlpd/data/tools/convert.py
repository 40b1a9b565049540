"""Converts HDF5 episodes (ALOHA, DROID) to LeRobot v3.0, a block of frames at a time."""

import shutil
from pathlib import Path

import rich.progress

from acrlpd.console import Console
from acrlpd.data.pipeline.labels import Labels, labels_path, load_labels
from acrlpd.data.sources.lerobot import LeRobotSource
from acrlpd.data.sources.source import DatasetError, EpisodeError, EpisodeSource, Feature, SkippedEpisode
from acrlpd.data.tools.lerobot_writer import ADDED, LeRobotWriter
from acrlpd.files import only_one


def convert_to_lerobot(
    source: EpisodeSource,
    output: Path,
    *,
    task: str | None = None,
    codec: str = "libsvtav1",
    robot_type: str | None = None,
) -> list[SkippedEpisode]:
    """Writes the source as a LeRobot v3.0 dataset; returns the episodes left out.

    The result appears under `output` when it is complete. `task` is the prompt of episodes without a prompt. Columns
    whose name LeRobot does not allow (DROID's HDF5 paths) are left out; those that openpi's configs use have other
    names as well. A bad episode raises, or is left out with on_bad_episode=skip. Labels are copied, under the new
    episode numbers.
    """
    if isinstance(source, LeRobotSource):
        raise DatasetError(f"{source.root} is {source.format} already, which needs no conversion")
    if output.exists() and any(output.iterdir()):
        raise DatasetError(f"{output}: not empty; convert into a new directory")
    labels, new_labels = load_labels(labels_path(source.root), source), labels_path(output)
    if labels is not None and new_labels.exists():
        raise DatasetError(f"{new_labels}: exists, and {labels.path} would replace it; move one of them away")
    work = output.with_name(f".{output.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    with only_one(work, f"converting to {output}", DatasetError):
        partial = work / "dataset"
        shutil.rmtree(partial, ignore_errors=True)  # left behind by a conversion that stopped
        skipped = _convert(source, partial, task, codec, robot_type)
        if len(skipped) == len(source) + len(source.skipped):
            reason = f"; the first: {skipped[0].reason}" if skipped else ""
            raise DatasetError(f"{source.root}: none of {len(skipped)} episodes could be converted{reason}")
        if output.exists():
            output.rmdir()
        partial.replace(output)
        if labels is not None:
            left_out = {episode.index for episode in skipped}
            kept = [index for index in source.indices if index not in left_out]
            found = {new: labels.episodes[old] for new, old in enumerate(kept) if old in labels.episodes}
            Labels(new_labels, found).save()
    shutil.rmtree(work, ignore_errors=True)  # only the lock is left
    return skipped


def _convert(
    source: EpisodeSource, output: Path, task: str | None, codec: str, robot_type: str | None
) -> list[SkippedEpisode]:
    columns = [name for name in source.features if "/" not in name and name not in (*ADDED, *source.cameras)]
    features = {name: source.features[name] for name in columns}
    features |= {camera: Feature("video", source.features[camera].shape) for camera in source.cameras}
    skipped = list(source.skipped)
    with LeRobotWriter(output, fps=source.fps, features=features, robot_type=robot_type, codec=codec) as writer:
        for i in rich.progress.track(range(len(source)), "converting episodes", console=Console(stderr=True)):
            try:
                _copy_episode(source, i, writer, columns, task)
            except EpisodeError as error:
                if source.on_bad_episode == "error":
                    raise
                writer.discard_episode()
                skipped.append(SkippedEpisode(source.indices[i], str(error)))
    return skipped


def _copy_episode(source: EpisodeSource, i: int, writer: LeRobotWriter, columns: list[str], task: str | None) -> None:
    episode = source.episode(i)
    prompt = episode.prompt or task
    if prompt is None:
        raise DatasetError(f"{source.root}: episode {episode.index} has no prompt; say what the robot does with --task")
    writer.add_episode(episode, {name: episode.columns[name] for name in columns}, source.cameras, prompt)
