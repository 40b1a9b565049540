"""Opening HDF5 files so that every failure names the file and the episode."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np

from acrlpd.data.sources.source import EpisodeError, Feature

_SAMPLE_BYTES = 4096
# Where the shapes of a dataset of HDF5 files are taken from.
FIRST_EPISODE = "in the first episode"


@contextlib.contextmanager
def open_hdf5(path: Path, episode: int) -> Iterator[h5py.File]:
    """An open file; what h5py raises inside (missing or damaged data) becomes an EpisodeError."""
    if not path.is_file():
        raise EpisodeError("the file is missing", path=path, episode=episode)
    try:
        with h5py.File(path, "r", locking=False) as file:  # locks fail on many network file systems
            yield file
    except OSError as error:
        raise EpisodeError(
            f"not a readable HDF5 file, truncated or damaged ({error})", path=path, episode=episode
        ) from None
    except KeyError as error:
        raise EpisodeError(f"incomplete HDF5 file ({error.args[0]})", path=path, episode=episode) from None


def read_rows(file: h5py.File, name: str, path: Path, episode: int) -> np.ndarray:
    """A dataset with one row per step, in whole."""
    values = np.asarray(file[name][()])
    if not values.ndim:
        raise EpisodeError(f"{name} is a single value, expected one row per step", path=path, episode=episode)
    return values


def read_success(file: h5py.File, path: Path, episode: int) -> bool:
    """The attribute `success`; False where there is none. Text is refused: "false" would count as a success."""
    success = np.asarray(file.attrs.get("success", False))
    if success.size != 1 or success.dtype.kind not in "biuf":
        raise EpisodeError(
            f"the attribute 'success' is {file.attrs['success']!r}, expected true or false", path=path, episode=episode
        )
    return bool(success.item())


def check_shapes(
    columns: Mapping[str, np.ndarray], features: Mapping[str, Feature], *, path: Path, episode: int
) -> None:
    """Raises EpisodeError where a column has other dims than in the episode that the features were taken from."""
    for name, values in columns.items():
        found, expected = values.shape[1:], features[name].shape
        if found != expected:
            raise EpisodeError(
                f"column {name!r} is {list(found)} per step, {FIRST_EPISODE} {list(expected)}",
                path=path,
                episode=episode,
            )


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
