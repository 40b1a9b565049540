"""DROID episodes: `trajectory.h5` for the robot, one MP4 per camera, a metadata JSON with the camera roles.

The columns that openpi's DROID configs use carry the names of openpi's LeRobot conversion (joint_position,
gripper_position, actions); all other columns keep their HDF5 path. Cameras are named by role.
"""

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from acrlpd.data.sources.hdf5_file import FIRST_EPISODE, Hdf5Source, identity_of_files, read_success
from acrlpd.data.sources.source import BadDataError, DatasetError, Feature, check_frame_shape, locating
from acrlpd.data.sources.video import VideoPool, read_video_frames
from acrlpd.files import is_plain_name, read_json_object

_CAMERA_KEYS = {
    "exterior_image_1_left": "ext1_cam_serial",
    "exterior_image_2_left": "ext2_cam_serial",
    "wrist_image_left": "wrist_cam_serial",
}
# Columns of openpi's DROID configs, and the datasets that they join side by side.
_OPENPI_COLUMNS = {
    "joint_position": ("observation/robot_state/joint_positions",),
    "gripper_position": ("observation/robot_state/gripper_position",),
    "actions": ("action/joint_velocity", "action/gripper_position"),
}
_OUTCOME = ("next.done", "next.success")
_TRAJECTORY = "trajectory.h5"
_METADATA = "metadata_*.json"
# Camera calibration is left out: its keys are serial numbers, which differ from lab to lab.
_READ = (
    "action/",
    "observation/robot_state/",
    "observation/controller_info/",
    "observation/timestamp/skip_action",
)


class DroidSource(Hdf5Source):
    """All trajectories below a directory, in the order of their paths."""

    format = "DROID"
    # DROID's control rate; each MP4 has one frame per control step, at whatever rate it is encoded.
    fps = 15.0
    steps = "action/joint_velocity"

    def __init__(self, root: Path) -> None:
        # All folders with a trajectory, or with metadata that promises one.
        self._folders = sorted({path.parent for name in (_TRAJECTORY, _METADATA) for path in root.rglob(name)})
        self._videos = VideoPool()
        self._metadata_of = functools.lru_cache(maxsize=4096)(self._read_metadata)
        super().__init__(root, {index: folder / _TRAJECTORY for index, folder in enumerate(self._folders)})

    @functools.cached_property
    def identity(self) -> str:
        files = [path for folder in self._folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return identity_of_files(self.root, files)

    def close(self) -> None:
        self._videos.close()

    def _features(self, file: h5py.File, index: int) -> dict[str, Feature]:
        """The numeric per-step datasets by their path, the columns with openpi's and LeRobot's names, and cameras."""
        features: dict[str, Feature] = {}

        def visit(name: str, item: h5py.Dataset | h5py.Group) -> None:
            if name.startswith(_READ) and isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub":
                features[name] = Feature(item.dtype.name, item.shape[1:])

        file.visititems(visit)
        for name in (*_OPENPI_COLUMNS, *_OUTCOME):
            values = self._column(file, name)
            features[name] = Feature(values.dtype.name, values.shape[1:])
        metadata = self._metadata_of(index)
        for camera in (camera for camera, key in _CAMERA_KEYS.items() if metadata.get(key)):
            path = self._video(index, camera)
            with locating(path, index, camera), self._videos.reader(path) as reader:
                features[camera] = Feature("video", (reader.height, reader.width, 3))
        return features

    def _column(self, file: h5py.File, name: str) -> np.ndarray:
        length = len(file[self.steps])
        if name in _OUTCOME:
            last = np.arange(length) == length - 1
            return last & (name == "next.done" or read_success(file))
        if name not in _OPENPI_COLUMNS:
            return self.read_rows(file, name)
        parts = [self.read_rows(file, part) for part in _OPENPI_COLUMNS[name]]
        values = np.column_stack(parts) if len(parts) > 1 else parts[0]
        with np.errstate(over="ignore"):  # a value that does not fit becomes infinite, and is refused as such
            return values.astype(np.float32)

    def _prompt(self, file: h5py.File, index: int) -> str | None:
        metadata = self._metadata_of(index)
        annotation = self._annotations.get(metadata.get("uuid", ""), {})
        return annotation.get("language_instruction1") or metadata.get("current_task")

    def _read_metadata(self, index: int) -> dict[str, Any]:
        found = sorted(self._folders[index].glob(_METADATA))
        with locating(found[0] if len(found) == 1 else self._folders[index], index):
            if len(found) != 1:
                raise BadDataError(f"expected one {_METADATA} with the camera serials, found {len(found)}")
            try:
                return read_json_object(found[0])
            except ValueError as error:
                raise BadDataError(f"not a JSON object, truncated or damaged ({error})") from None

    @functools.cached_property
    def _annotations(self) -> dict[str, dict[str, str]]:
        """DROID's language annotations by episode uuid, if their file lies beside the episodes."""
        annotations: dict[str, dict[str, str]] = {}
        for path in sorted(self.root.glob("aggregated-annotations*.json")):
            try:
                annotations |= read_json_object(path)
            except ValueError as error:
                raise DatasetError(f"{path}: not a JSON object, truncated or damaged ({error})") from None
        return annotations

    def _video(self, index: int, camera: str) -> Path:
        serial = self._metadata_of(index).get(_CAMERA_KEYS[camera])
        with locating(self._folders[index], index, camera):
            if not serial:
                raise BadDataError(f"the metadata has no {_CAMERA_KEYS[camera]}")
            if not is_plain_name(str(serial)):
                raise BadDataError(f"{_CAMERA_KEYS[camera]} is {serial!r}, expected the serial number of a camera")
        return self._folders[index] / "recordings" / "MP4" / f"{serial}.mp4"

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        path = self._video(index, camera)
        with locating(path, index, camera):
            frames = read_video_frames(self._videos, path, ts)
            check_frame_shape(frames.shape[1:], self.features[camera].shape, FIRST_EPISODE)
        return frames

    def _check_camera(self, index: int, camera: str) -> None:
        path, length = self._video(index, camera), self._length(index)
        with locating(path, index, camera), self._videos.reader(path) as reader:
            start, fps = reader.numbering()
            reader.check_range(start, length, fps)
            check_frame_shape((reader.height, reader.width, 3), self.features[camera].shape, FIRST_EPISODE)
