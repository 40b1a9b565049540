"""ACT / ALOHA episodes: one HDF5 file each, frames raw or as zero-padded JPEG.

Columns and cameras carry the names that openpi's LeRobot conversion gives them, so a config works on the raw files and
on their conversion alike.
"""

import functools
import re
from pathlib import Path

import h5py
import numpy as np
import simplejpeg

from acrlpd.data.sources.hdf5_file import FIRST_EPISODE, Hdf5Source, identity_of_files, read_success
from acrlpd.data.sources.source import BadDataError, DatasetError, Feature, check_frame_shape, locating

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


class AlohaHdf5Source(Hdf5Source):
    """A directory of `episode_<n>.hdf5` files, or of files with other names, which are numbered in sorted order."""

    format = "ALOHA HDF5"
    steps = "action"

    def __init__(self, root: Path) -> None:
        super().__init__(root, _numbered(root, sorted(root.glob("*.hdf5"))))

    @functools.cached_property
    def identity(self) -> str:
        return identity_of_files(self.root, [self._paths[index] for index in sorted(self._paths)])

    def _features(self, file: h5py.File, index: int) -> dict[str, Feature]:
        # ALOHA's control rate, for files without an attribute `fps`.
        self.fps = float(file.attrs.get("fps", 50.0))
        features = {}
        for name, key in _COLUMNS.items():
            if key in file and isinstance(file[key], h5py.Dataset):
                shape = file[key].shape[1:]
                features[name] = Feature(file[key].dtype.name, () if shape == (1,) else shape)
        if "success" in file.attrs:
            features.setdefault("next.success", Feature("bool", ()))
        missing = [_COLUMNS[name] for name in _REQUIRED if name not in features]
        if missing:
            raise BadDataError(f"no dataset {missing[0]!r}; this is not an ALOHA file")
        if not len(file["action"]):
            raise BadDataError("it has no steps")
        for camera in file.get(_IMAGES, ()):
            with locating(self._paths[index], index, name := _CAMERA_PREFIX + camera):
                features[name] = Feature("image", _frame_shape(file[_IMAGES][camera]))
        return features

    def _column(self, file: h5py.File, name: str) -> np.ndarray:
        key, length = _COLUMNS[name], len(file[self.steps])
        if key not in file and name == "next.success" and "success" in file.attrs:
            return (np.arange(length) == length - 1) & read_success(file)
        if key not in file:
            raise BadDataError(f"no dataset {key!r}, which other episodes have")
        values = self.read_rows(file, key)
        return values[:, 0] if values.shape[1:] == (1,) else values

    def _prompt(self, file: h5py.File, index: int) -> str | None:
        """The attribute `task`; writers other than h5py store text as bytes of a fixed length."""
        task = file.attrs.get("task")
        try:
            return task.decode() if isinstance(task, bytes) else None if task is None else str(task)
        except UnicodeDecodeError as error:
            raise BadDataError(f"the attribute 'task' is not text ({error})") from None

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        frames = np.empty((len(ts), *self.features[camera].shape), np.uint8)
        with self._open(index, camera) as file:
            images = _images(file, camera)
            for k, t in enumerate(ts.tolist()):
                frames[k] = _decode_frame(images, t, frames.shape[1:])
        return frames

    def _check_camera(self, index: int, camera: str) -> None:
        with self._open(index, camera) as file:
            check_frame_shape(_frame_shape(_images(file, camera)), self.features[camera].shape, FIRST_EPISODE)


def _numbered(root: Path, paths: list[Path]) -> dict[int, Path]:
    """Episode number -> file: the number in `episode_<n>.hdf5`, or the place in the order if no file has one.

    A mixture is refused. One more file would give other numbers to all episodes, and their labels to other episodes.
    """
    numbered: dict[int, Path] = {}
    others = []
    for path in paths:
        match = re.fullmatch(r"episode_(\d+)", path.stem)
        if match is None or numbered.setdefault(int(match[1]), path) != path:
            others.append(path.name)
    if numbered and others:
        raise DatasetError(
            f"{root}: {len(numbered)} files have a number of their own, as in {min(numbered.values()).name}, and "
            f"{len(others)} do not: {', '.join(others[:3])}. Move or rename these, so that each file has a number of "
            "its own, or no file has one"
        )
    return numbered or dict(enumerate(paths))


def _images(file: h5py.File, camera: str) -> h5py.Dataset:
    name, length = f"{_IMAGES}/{camera.removeprefix(_CAMERA_PREFIX)}", len(file["action"])
    if name not in file:
        raise BadDataError(f"the camera is missing, the file has {list(file[_IMAGES])}")
    images = file[name]
    if len(images) != length:
        raise BadDataError(f"{len(images)} frames for {length} actions")
    return images


def _frame_shape(images: h5py.Dataset | h5py.Group) -> tuple[int, ...]:
    """Height, width and channels; of JPEG frames, from the header of the first one."""
    if not isinstance(images, h5py.Dataset) or images.ndim not in (1, 2, 4):
        found = list(images.shape) if isinstance(images, h5py.Dataset) else f"a group of {list(images)}"
        raise BadDataError(
            f"expected frames [steps, height, width, 3] or JPEG bytes, found {found}; move other data out of {_IMAGES}"
        )
    if images.ndim == 4:
        return images.shape[1:]
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(np.ascontiguousarray(images[0]))
    except (ValueError, IndexError) as error:  # the first frame is not a JPEG, or there is no frame
        raise BadDataError(f"not a readable JPEG ({error})", frame=0) from None
    return height, width, 3


def _decode_frame(images: h5py.Dataset, t: int, shape: tuple[int, ...]) -> np.ndarray:
    """A raw frame, or a decoded JPEG. The zeros that pad a JPEG come after its end marker and do no harm."""
    try:
        frame = images[t]
        frame = frame if images.ndim == 4 else simplejpeg.decode_jpeg(np.ascontiguousarray(frame), colorspace="RGB")
    except ValueError as error:
        raise BadDataError(f"not a readable JPEG ({error})", frame=t) from None
    if frame.shape != shape or frame.dtype != np.uint8:
        raise BadDataError(
            f"the frame is {frame.dtype} {list(frame.shape)}, {FIRST_EPISODE} uint8 {list(shape)}", frame=t
        )
    return frame
