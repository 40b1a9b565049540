"""DROID episodes: `trajectory.h5` for the robot, one MP4 per camera, a metadata JSON with the camera roles.

The columns that openpi's DROID configs use carry the names of its LeRobot conversion (joint_position,
gripper_position, actions); all others keep their HDF5 path. Cameras are named by role.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from acrlpd.data.sources.hdf5_file import (
    FIRST_EPISODE,
    check_shapes,
    identity_of_files,
    open_hdf5,
    read_rows,
    read_success,
)
from acrlpd.data.sources.source import (
    ColumnTable,
    DatasetError,
    EpisodeError,
    EpisodeSource,
    Feature,
    check_columns,
    check_frame_shape,
)
from acrlpd.data.sources.video import VideoError, VideoPool, read_video_frames

# DROID's control rate; each MP4 has one frame per control step, at whatever rate it is encoded.
DROID_FPS = 15.0
_CAMERA_KEYS = {
    "exterior_image_1_left": "ext1_cam_serial",
    "exterior_image_2_left": "ext2_cam_serial",
    "wrist_image_left": "wrist_cam_serial",
}
# What openpi's DROID configs use, from these datasets, side by side.
_OPENPI_COLUMNS = {
    "joint_position": ("observation/robot_state/joint_positions",),
    "gripper_position": ("observation/robot_state/gripper_position",),
    "actions": ("action/joint_velocity", "action/gripper_position"),
}
_OUTCOME = ("next.done", "next.success")
_TRAJECTORY = "trajectory.h5"
_METADATA = "metadata_*.json"
_LENGTH = "action/joint_velocity"
# Camera calibration is keyed by serial number, which differs from lab to lab, and is left out.
_READ = (
    "action/",
    "observation/robot_state/",
    "observation/controller_info/",
    "observation/timestamp/skip_action",
)


class DroidSource(EpisodeSource):
    """All trajectories below a directory, in the order of their paths."""

    format = "DROID"
    fps = DROID_FPS

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders = _find_episodes(root)
        self.indices = tuple(range(len(self._folders)))
        self._videos = VideoPool()
        self._length_of = functools.lru_cache(maxsize=None)(self._read_length)
        self._metadata_of = functools.lru_cache(maxsize=4096)(self._read_metadata)
        self._describe()

    def _describe(self) -> None:
        """Takes cameras and columns from the first episode that can be read."""
        problem: EpisodeError | None = None
        for index in self.indices:
            try:
                path = self._trajectory(index)
                with open_hdf5(path, index) as file:
                    columns = _column_features(file, path, index)
                sizes = {camera: self._frame_size(index, camera) for camera in self._cameras_of(index)}
            except EpisodeError as error:
                problem = problem or error
                continue
            self.cameras = tuple(sizes)
            self.features = columns | {c: Feature("video", (h, w, 3)) for c, (h, w) in sizes.items()}
            return
        raise DatasetError(f"none of {len(self.indices)} episodes can be read; the first: {problem}")

    @functools.cached_property
    def identity(self) -> str:
        files = [path for folder in self._folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return identity_of_files(self.root, files)

    def close(self) -> None:
        self._videos.close()

    def _length(self, index: int) -> int:
        return self._length_of(index)

    def _read_length(self, index: int) -> int:
        with open_hdf5(self._trajectory(index), index) as file:
            return len(file[_LENGTH])

    def _trajectory(self, index: int) -> Path:
        return self._folders[index] / _TRAJECTORY

    def _read_metadata(self, index: int) -> dict[str, Any]:
        found = sorted(self._folders[index].glob(_METADATA))
        if len(found) != 1:
            raise EpisodeError(
                f"expected one {_METADATA} with the camera serials, found {len(found)}",
                path=self._folders[index],
                episode=index,
            )
        try:
            return json.loads(found[0].read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise EpisodeError(
                f"not valid JSON, truncated or damaged ({error})", path=found[0], episode=index
            ) from None

    @functools.cached_property
    def _annotations(self) -> dict[str, dict[str, str]]:
        """DROID's language annotations by episode uuid, where their file lies beside the episodes."""
        annotations: dict[str, dict[str, str]] = {}
        for path in sorted(self.root.glob("aggregated-annotations*.json")):
            annotations |= json.loads(path.read_text())
        return annotations

    def _prompt(self, index: int) -> str | None:
        metadata = self._metadata_of(index)
        annotation = self._annotations.get(metadata.get("uuid", ""), {})
        return annotation.get("language_instruction1") or metadata.get("current_task")

    def _cameras_of(self, index: int) -> list[str]:
        metadata = self._metadata_of(index)
        return [camera for camera, key in _CAMERA_KEYS.items() if metadata.get(key)]

    def _video(self, index: int, camera: str) -> Path:
        serial = self._metadata_of(index).get(_CAMERA_KEYS[camera])
        if not serial:
            raise EpisodeError(
                f"the metadata has no {_CAMERA_KEYS[camera]}",
                path=self._folders[index],
                episode=index,
                camera=camera,
            )
        return self._folders[index] / "recordings" / "MP4" / f"{serial}.mp4"

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        path = self._trajectory(index)
        with open_hdf5(path, index) as file:
            length = len(file[_LENGTH])
            wanted = [n for n in self.features if n not in self.cameras] if names is None else names
            columns = {name: _read_column(file, name, path, index) for name in wanted}
        check_columns(columns, path=path, episode=index)
        check_shapes(columns, self.features, path=path, episode=index)
        prompt = self._prompt(index)
        return ColumnTable(columns, np.array([0, length], np.int64), (prompt,), np.zeros(length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        path = self._video(index, camera)
        try:
            frames = read_video_frames(self._videos, path, ts)
        except VideoError as error:
            raise EpisodeError(str(error), path=path, episode=index, frame=error.step, camera=camera) from None
        check_frame_shape(
            frames.shape[1:], self.features[camera].shape, FIRST_EPISODE, path=path, episode=index, camera=camera
        )
        return frames

    def _frame_size(self, index: int, camera: str) -> tuple[int, int]:
        path = self._video(index, camera)
        try:
            with self._videos.reader(path) as reader:
                return reader.height, reader.width
        except VideoError as error:
            raise EpisodeError(str(error), path=path, episode=index, camera=camera) from None

    def _check_camera(self, index: int, camera: str) -> None:
        path, length = self._video(index, camera), self._length(index)
        try:
            with self._videos.reader(path) as reader:
                start, fps = reader.numbering()
                reader.check_range(start, length, fps)
                shape = (reader.height, reader.width, 3)
        except VideoError as error:
            raise EpisodeError(str(error), path=path, episode=index, camera=camera) from None
        check_frame_shape(shape, self.features[camera].shape, FIRST_EPISODE, path=path, episode=index, camera=camera)


def is_droid(root: Path) -> bool:
    return next(root.rglob(_TRAJECTORY), None) is not None


def _find_episodes(root: Path) -> list[Path]:
    """All folders with a trajectory, or with metadata that promises one."""
    return sorted({path.parent for name in (_TRAJECTORY, _METADATA) for path in root.rglob(name)})


def _column_features(file: h5py.File, path: Path, index: int) -> dict[str, Feature]:
    """The numeric per-step datasets by their path, and the columns with openpi's and LeRobot's names."""
    features: dict[str, Feature] = {}

    def visit(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if name.startswith(_READ) and isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub":
            features[name] = Feature(item.dtype.name, item.shape[1:])

    file.visititems(visit)
    for name in (*_OPENPI_COLUMNS, *_OUTCOME):
        values = _read_column(file, name, path, index)
        features[name] = Feature(values.dtype.name, values.shape[1:])
    return features


def _read_column(file: h5py.File, name: str, path: Path, index: int) -> np.ndarray:
    length = len(file[_LENGTH])
    if name in _OUTCOME:
        last = np.arange(length) == length - 1
        return last & (name == "next.done" or read_success(file, path, index))
    parts = {part: read_rows(file, part, path, index) for part in _OPENPI_COLUMNS.get(name, (name,))}
    for part, values in parts.items():
        if len(values) != length:
            raise EpisodeError(f"{part} has {len(values)} rows, {_LENGTH} has {length}", path=path, episode=index)
    if name not in _OPENPI_COLUMNS:
        return parts[name]
    values = np.column_stack(list(parts.values())) if len(parts) > 1 else next(iter(parts.values()))
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused as such
        return values.astype(np.float32)
