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

from acrlpd.data.hdf5_file import identity_of_files, open_hdf5
from acrlpd.data.source import ColumnTable, DatasetError, EpisodeError, EpisodeSource, Feature, check_columns
from acrlpd.data.video import VideoError, VideoPool, read_video_frames

# DROID's control rate; each MP4 has one frame per control step, at whatever rate its header claims.
DROID_FPS = 15.0
_CAMERA_KEYS = {
    "exterior_image_1_left": "ext1_cam_serial",
    "exterior_image_2_left": "ext2_cam_serial",
    "wrist_image_left": "wrist_cam_serial",
}
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
                columns = self._read_all(index)
                sizes = {camera: self._frame_size(index, camera) for camera in self._cameras_of(index)}
            except EpisodeError as error:
                problem = problem or error
                continue
            self.cameras = tuple(sizes)
            self.features = {n: Feature(v.dtype.name, v.shape[1:]) for n, v in columns.items()}
            self.features |= {c: Feature("video", (h, w, 3)) for c, (h, w) in sizes.items()}
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

    def _read_all(self, index: int) -> dict[str, np.ndarray]:
        path = self._trajectory(index)
        with open_hdf5(path, index) as file:
            columns, success = _flatten(file), bool(file.attrs.get("success", False))
            length = len(file[_LENGTH])
            for name, values in columns.items():
                if len(values) != length:
                    raise EpisodeError(
                        f"{name} has {len(values)} rows, {_LENGTH} has {length}", path=path, episode=index
                    )
            return _with_openpi_names(columns, success)

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        path, columns = self._trajectory(index), self._read_all(index)
        wanted = [n for n in self.features if n not in self.cameras] if names is None else names
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise EpisodeError(f"no dataset {missing[0]!r}, which other episodes have", path=path, episode=index)
        columns = {name: columns[name] for name in wanted}
        check_columns(columns, path=path, episode=index)
        length = self._length(index)
        prompt = self._prompt(index)
        return ColumnTable(columns, np.array([0, length], np.int64), (prompt,), np.zeros(length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        path = self._video(index, camera)
        try:
            frames = read_video_frames(self._videos, path, ts)
        except VideoError as error:
            raise EpisodeError(str(error), path=path, episode=index, frame=error.step, camera=camera) from None
        expected = self.features[camera].shape
        if frames.shape[1:] != expected:
            raise EpisodeError(
                f"frames are {list(frames.shape[1:])}, in the first episode {list(expected)}",
                path=path,
                episode=index,
                camera=camera,
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
                reader.check_range(0.0, length, reader.fps)
        except VideoError as error:
            raise EpisodeError(str(error), path=path, episode=index, camera=camera) from None


def is_droid(root: Path) -> bool:
    return next(root.rglob(_TRAJECTORY), None) is not None


def _find_episodes(root: Path) -> list[Path]:
    """All folders with a trajectory, or with metadata that promises one."""
    return sorted({path.parent for name in (_TRAJECTORY, _METADATA) for path in root.rglob(name)})


def _flatten(file: h5py.File) -> dict[str, np.ndarray]:
    """The numeric per-step datasets by their path."""
    columns: dict[str, np.ndarray] = {}

    def visit(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if name.startswith(_READ) and isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub":
            columns[name] = item[()]

    file.visititems(visit)
    return columns


def _with_openpi_names(columns: dict[str, np.ndarray], success: bool) -> dict[str, np.ndarray]:
    """Adds openpi's names for what its configs use, and the outcome as LeRobot's next.* columns."""
    velocity, gripper = columns[_LENGTH], columns["action/gripper_position"]
    done = np.zeros(len(velocity), bool)
    done[-1:] = True
    numbers = {
        "joint_position": columns["observation/robot_state/joint_positions"],
        "gripper_position": columns["observation/robot_state/gripper_position"],
        "actions": np.column_stack([velocity, gripper]),
    }
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused as such
        columns = columns | {name: values.astype(np.float32) for name, values in numbers.items()}
    return columns | {"next.done": done, "next.success": done & success}
