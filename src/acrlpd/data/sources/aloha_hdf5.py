"""ACT / ALOHA episodes: one HDF5 file each, frames raw or as zero-padded JPEG.

Columns and cameras carry the names that openpi's LeRobot conversion gives them, so a config works on the
raw files and on their conversion alike.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import simplejpeg

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

# ALOHA's control rate; the files do not say it unless a writer added an attribute `fps`.
ALOHA_FPS = 50.0
_IMAGES = "observations/images"
_COLUMNS = {
    "observation.state": "observations/qpos",
    "observation.velocity": "observations/qvel",
    "observation.effort": "observations/effort",
    "action": "action",
    "base_action": "base_action",
    "next.reward": "reward",
    "next.done": "done",
    "next.success": "success",
}
_REQUIRED = ("observation.state", "action")
_CAMERA_PREFIX = "observation.images."


class AlohaHdf5Source(EpisodeSource):
    """A directory of `episode_<n>.hdf5` files (any other names are numbered in sorted order)."""

    format = "ALOHA HDF5"

    def __init__(self, root: Path) -> None:
        self.root = root
        self._paths = _numbered(sorted(root.glob("*.hdf5")))
        self.indices = tuple(sorted(self._paths))
        self._length_of = functools.lru_cache(maxsize=None)(self._read_length)
        self._describe()

    def _describe(self) -> None:
        """Takes rate, cameras and columns from the first file that can be read."""
        problem: EpisodeError | None = None
        for index in self.indices:
            try:
                with open_hdf5(self._paths[index], index) as file:
                    self.fps = float(file.attrs.get("fps", ALOHA_FPS))
                    self.features = _features(file, self._paths[index], index)
                    self.cameras = tuple(n for n in self.features if n.startswith(_CAMERA_PREFIX))
                return
            except EpisodeError as error:
                problem = problem or error
        raise DatasetError(f"none of {len(self.indices)} episodes can be read; the first: {problem}")

    @functools.cached_property
    def identity(self) -> str:
        return identity_of_files(self.root, [self._paths[index] for index in sorted(self._paths)])

    def _length(self, index: int) -> int:
        return self._length_of(index)

    def _read_length(self, index: int) -> int:
        with open_hdf5(self._paths[index], index) as file:
            return len(file["action"])

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        path = self._paths[index]
        with open_hdf5(path, index) as file:
            length = len(file["action"])
            wanted = [n for n in self.features if n not in self.cameras] if names is None else names
            columns = {name: _read_column(file, name, length, path, index) for name in wanted}
            prompt = _read_prompt(file, path, index)
        check_columns(columns, path=path, episode=index)
        check_shapes(columns, self.features, path=path, episode=index)
        return ColumnTable(columns, np.array([0, length], np.int64), (prompt,), np.zeros(length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        path = self._paths[index]
        frames = np.empty((len(ts), *self.features[camera].shape), np.uint8)
        with open_hdf5(path, index) as file:
            images = self._images(file, index, camera)
            for k, t in enumerate(ts.tolist()):
                frames[k] = _decode_frame(images, t, self.features[camera].shape, path, index, camera)
        return frames

    def _check_camera(self, index: int, camera: str) -> None:
        path = self._paths[index]
        with open_hdf5(path, index) as file:
            shape = _frame_shape(self._images(file, index, camera), path, index, camera)
        check_frame_shape(shape, self.features[camera].shape, FIRST_EPISODE, path=path, episode=index, camera=camera)

    def _images(self, file: h5py.File, index: int, camera: str) -> h5py.Dataset:
        name, length = f"{_IMAGES}/{camera.removeprefix(_CAMERA_PREFIX)}", len(file["action"])
        if name not in file:
            raise EpisodeError(
                f"the camera is missing, the file has {list(file[_IMAGES])}",
                path=self._paths[index],
                episode=index,
                camera=camera,
            )
        images = file[name]
        if len(images) != length:
            raise EpisodeError(
                f"{len(images)} frames for {length} actions",
                path=self._paths[index],
                episode=index,
                camera=camera,
            )
        return images


def _numbered(paths: list[Path]) -> dict[int, Path]:
    """Episode number -> file, from the number in `episode_<n>.hdf5` where all files have one."""
    matches = [re.fullmatch(r"episode_(\d+)", path.stem) for path in paths]
    numbers = [int(match[1]) for match in matches if match]
    if len(set(numbers)) == len(paths):
        return dict(zip(numbers, paths, strict=True))
    return dict(enumerate(paths))


def _features(file: h5py.File, path: Path, index: int) -> dict[str, Feature]:
    features = {}
    for name, key in _COLUMNS.items():
        if key in file and isinstance(file[key], h5py.Dataset):
            shape = file[key].shape[1:]
            features[name] = Feature(file[key].dtype.name, () if shape == (1,) else shape)
    if "success" in file.attrs:
        features.setdefault("next.success", Feature("bool", ()))
    missing = [_COLUMNS[name] for name in _REQUIRED if name not in features]
    if missing:
        raise EpisodeError(f"no dataset {missing[0]!r}; this is not an ALOHA file", path=path, episode=index)
    if not len(file["action"]):
        raise EpisodeError("it has no steps", path=path, episode=index)
    for camera in file.get(_IMAGES, ()):
        name = _CAMERA_PREFIX + camera
        features[name] = Feature("image", _frame_shape(file[_IMAGES][camera], path, index, name))
    return features


def _read_prompt(file: h5py.File, path: Path, index: int) -> str | None:
    """The attribute `task`; writers other than h5py store text as bytes of a fixed length."""
    task = file.attrs.get("task")
    try:
        return task.decode() if isinstance(task, bytes) else None if task is None else str(task)
    except UnicodeDecodeError as error:
        raise EpisodeError(f"the attribute 'task' is not text ({error})", path=path, episode=index) from None


def _frame_shape(images: h5py.Dataset | h5py.Group, path: Path, index: int, camera: str) -> tuple[int, ...]:
    """Height, width and channels, from the header of the first frame where they are JPEG."""
    if not isinstance(images, h5py.Dataset) or images.ndim not in (1, 2, 4):
        found = list(images.shape) if isinstance(images, h5py.Dataset) else f"a group of {list(images)}"
        raise EpisodeError(
            f"expected frames [steps, height, width, 3] or JPEG bytes, found {found}; move what is no camera out of "
            f"{_IMAGES}",
            path=path,
            episode=index,
            camera=camera,
        )
    if images.ndim == 4:
        return images.shape[1:]
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(np.ascontiguousarray(images[0]))
    except (ValueError, IndexError) as error:  # no image, or no frame at all
        raise _not_a_jpeg(error, path, index, 0, camera) from None
    return height, width, 3


def _read_column(file: h5py.File, name: str, length: int, path: Path, index: int) -> np.ndarray:
    key = _COLUMNS[name]
    if key not in file and name == "next.success" and "success" in file.attrs:
        success = np.zeros(length, bool)
        success[-1:] = read_success(file, path, index)
        return success
    if key not in file:
        raise EpisodeError(f"no dataset {key!r}, which other episodes have", path=path, episode=index)
    values = read_rows(file, key, path, index)
    if len(values) != length:
        raise EpisodeError(f"{key} has {len(values)} rows, action has {length}", path=path, episode=index)
    return values[:, 0] if values.shape[1:] == (1,) else values


def _decode_frame(
    images: h5py.Dataset, t: int, shape: tuple[int, ...], path: Path, index: int, camera: str
) -> np.ndarray:
    frame = images[t] if images.ndim == 4 else _decode_jpeg(images[t], path, index, t, camera)
    if frame.shape != shape or frame.dtype != np.uint8:
        raise EpisodeError(
            f"the frame is {frame.dtype} {list(frame.shape)}, in the first episode uint8 {list(shape)}",
            path=path,
            episode=index,
            frame=t,
            camera=camera,
        )
    return frame


def _decode_jpeg(padded: np.ndarray, path: Path, index: int, t: int, camera: str) -> np.ndarray:
    """Decodes a JPEG; the zeros that pad it to a fixed length come after its end marker and do no harm."""
    try:
        return simplejpeg.decode_jpeg(np.ascontiguousarray(padded), colorspace="RGB")
    except ValueError as error:
        raise _not_a_jpeg(error, path, index, t, camera) from None


def _not_a_jpeg(error: Exception, path: Path, index: int, t: int, camera: str) -> EpisodeError:
    return EpisodeError(f"not a readable JPEG ({error})", path=path, episode=index, frame=t, camera=camera)
