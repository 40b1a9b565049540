"""What datasets of HDF5 files have in common: one file per episode, and no declaration of columns and shapes."""

import abc
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import h5py
import numpy as np

from acrlpd.data.sources.source import (
    BadDataError,
    ColumnTable,
    DatasetError,
    EpisodeError,
    EpisodeSource,
    Feature,
    check_columns,
    locating,
)
from acrlpd.files import are_plain_names

_SAMPLE_BYTES = 4096
# Files do not say which shapes they should have: the shapes of this episode count.
FIRST_EPISODE = "in the first episode"


class Hdf5Source(EpisodeSource):
    """Episodes of one HDF5 file each; columns and cameras are those of the first file that can be read."""

    # The dataset of a file that has one row per step.
    steps: ClassVar[str]

    def __init__(self, root: Path, paths: Mapping[int, Path]) -> None:
        """`paths` are the files by episode number."""
        self.root = root
        self._paths = paths
        self.indices = tuple(sorted(paths))
        self._lengths: dict[int, int] = {}
        self._checked: set[int] = set()  # episodes whose file is known to lead nowhere else
        self.features = self._first_features()
        self.cameras = tuple(name for name, feature in self.features.items() if feature.is_camera)

    @abc.abstractmethod
    def _features(self, file: h5py.File, index: int) -> dict[str, Feature]:
        """Columns and cameras of an episode."""

    @abc.abstractmethod
    def _column(self, file: h5py.File, name: str) -> np.ndarray:
        """One row per step of a column."""

    @abc.abstractmethod
    def _prompt(self, file: h5py.File, index: int) -> str | None: ...

    def _first_features(self) -> dict[str, Feature]:
        problem: EpisodeError | None = None
        for index in self.indices:
            try:
                with self._open(index) as file:
                    return self._features(file, index)
            except EpisodeError as error:
                problem = problem or error
        raise DatasetError(f"none of {len(self.indices)} episodes can be read; the first: {problem}")

    @contextlib.contextmanager
    def _open(self, index: int, camera: str | None = None) -> Iterator[h5py.File]:
        """The open file of an episode. Missing and damaged data that is found meanwhile becomes an EpisodeError."""
        path = self._paths[index]
        with locating(path, index, camera):
            if not path.is_file():
                raise BadDataError("the file is missing")
            try:
                with h5py.File(path, "r", locking=False) as file:  # locks fail on many network file systems
                    if index not in self._checked:
                        _check_other_files(file)
                        self._checked.add(index)
                    yield file
            except (BadDataError, DatasetError):
                raise
            except (OSError, RuntimeError, ValueError, TypeError) as error:  # h5py has no error class of its own
                raise BadDataError(f"not a readable HDF5 file, truncated or damaged ({error})") from None
            except KeyError as error:
                raise BadDataError(f"incomplete HDF5 file ({error.args[0]})") from None

    def _length(self, index: int) -> int:
        if index not in self._lengths:
            with self._open(index) as file:
                self._lengths[index] = len(file[self.steps])
        return self._lengths[index]

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        wanted = self.column_names if names is None else names
        with self._open(index) as file:
            length = len(file[self.steps])
            columns = {name: self._column(file, name) for name in wanted}
            prompt = self._prompt(file, index)
            check_columns(columns)
            for name, values in columns.items():
                found, expected = values.shape[1:], self.features[name].shape
                if found != expected:
                    raise BadDataError(f"column {name!r} is {list(found)} per step, {FIRST_EPISODE} {list(expected)}")
        return ColumnTable(columns, np.array([0, length], np.int64), (prompt,), np.zeros(length, np.int32))

    def read_rows(self, file: h5py.File, name: str) -> np.ndarray:
        """A dataset of the file with one row per step."""
        values, length = np.asarray(file[name][()]), len(file[self.steps])
        if not values.ndim:
            raise BadDataError(f"{name} is a single value, expected one row per step")
        if len(values) != length:
            raise BadDataError(f"{name} has {len(values)} rows, {self.steps} has {length}")
        return values


def _check_other_files(file: h5py.File) -> None:
    """HDF5 can keep data in other files. Raises BadDataError if such a file may lie outside of the dataset."""

    def linked(name: str, link: h5py.HardLink | h5py.SoftLink | h5py.ExternalLink) -> str | None:
        is_outside = isinstance(link, h5py.ExternalLink) and not are_plain_names(link.filename)
        return f"{name} leads to {link.filename!r}" if is_outside else None

    def stored(name: str, item: h5py.Dataset | h5py.Group) -> str | None:
        if not isinstance(item, h5py.Dataset):
            return None
        raw = [other for other, _, _ in item.external or ()]  # relative to wherever the process was started
        virtual = [source.file_name for source in item.virtual_sources()] if item.is_virtual else []
        outside = raw + [other for other in virtual if other != "." and not are_plain_names(other)]
        return f"{name} leads to {outside[0]!r}" if outside else None

    found = file.visititems_links(linked) or file.visititems(stored)  # the first result that is not None
    if found:
        raise BadDataError(f"{found}, a file outside of the dataset; copy the data into this file")


def read_success(file: h5py.File) -> bool:
    """The attribute `success`; False if there is none. Text is refused: "false" would count as a success."""
    success = np.asarray(file.attrs.get("success", False))
    if success.size != 1 or success.dtype.kind not in "biuf":
        raise BadDataError(f"the attribute 'success' is {file.attrs['success']!r}, expected true or false")
    return bool(success.item())


def identity_of_files(root: Path, paths: list[Path]) -> str:
    """Hash of names, sizes and both ends of files: changes with the content, not with place or date."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
