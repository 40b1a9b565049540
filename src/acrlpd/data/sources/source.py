"""Episodes on disk behind one protocol, whatever tool recorded them.

A source is opened lazily: `open_source` reads metadata only. Low-dimensional columns are read without
touching video (`EpisodeSource.read_columns`), frames are decoded only when asked for (`Episode.frames`).
"""

import abc
import contextlib
import copy
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from acrlpd.files import are_plain_names
from acrlpd.hub import HubAddress, HubError, fetch

OnBadEpisode = Literal["error", "skip"]

# The column of a replay with the noise that the policy made the chunk of each step from, where critics judge noise.
NOISE_COLUMN = "policy_noise"

_STEPS_PER_BLOCK = 32
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


class DatasetError(ValueError):
    """A dataset (or a cache of one) cannot be used as it is; the message names the file and the fix."""


class EpisodeError(DatasetError):
    """One episode cannot be used; with `on_bad_episode="skip"` the episode is left out and listed instead."""

    def __init__(self, problem: str, *, path: Path, episode: int, frame: int | None, camera: str | None) -> None:
        where = f"{path}: episode {episode}"
        where += "" if frame is None else f", frame {frame}"
        where += "" if camera is None else f", camera {camera!r}"
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.episode = episode
        self.frame = frame
        self.camera = camera


class BadDataError(ValueError):
    """What is wrong with the data of an episode, raised by code that does not know which episode it reads."""

    def __init__(self, problem: str, *, frame: int | None = None) -> None:
        super().__init__(problem)
        self.frame = frame


@contextlib.contextmanager
def locating(path: Path, episode: int, camera: str | None = None) -> Iterator[None]:
    """Turns BadDataError into an EpisodeError that says where the data lies."""
    try:
        yield
    except BadDataError as error:
        raise EpisodeError(str(error), path=path, episode=episode, frame=error.frame, camera=camera) from None


@dataclasses.dataclass(frozen=True)
class SkippedEpisode:
    """An episode that was left out because of `on_bad_episode="skip"`."""

    index: int  # the dataset's own episode index
    reason: str


@dataclasses.dataclass(frozen=True)
class Feature:
    """What a dataset declares about one of its columns or cameras."""

    dtype: str  # numpy name; "video" or "image" for a camera
    shape: tuple[int, ...]  # of one step; () for a scalar; a camera: (height, width, 3)

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("video", "image")


@dataclasses.dataclass(frozen=True)
class Episode:
    """One recorded episode: columns in memory, frames on demand."""

    index: int  # the dataset's own episode index, which error messages, labels and caches use
    length: int
    prompt: str | None  # the task of the first step; None if the dataset names no task
    columns: dict[str, np.ndarray]  # name -> [length, ...]; features of shape (1,) are [length]
    read_frames: Callable[[str, np.ndarray], np.ndarray]  # (camera, ts) -> uint8 [n, h, w, 3]

    def frame(self, camera: str, t: int) -> np.ndarray:
        """The frame of `camera` at step t: uint8 [h, w, 3]."""
        return self.frames(camera, [t])[0]

    def frames(self, camera: str, ts: Sequence[int] | np.ndarray) -> np.ndarray:
        """The frames at steps `ts`, in that order: uint8 [n, h, w, 3]. Sorted runs decode fastest."""
        return self.read_frames(camera, np.asarray(ts, np.int64))


@dataclasses.dataclass(frozen=True)
class ColumnTable:
    """Low-dimensional columns of episodes end to end; episode i is rows offsets[i]:offsets[i + 1]."""

    columns: dict[str, np.ndarray]  # name -> [N, ...]; features of shape (1,) are [N]
    offsets: np.ndarray  # int64 [episodes + 1]
    prompts: tuple[str | None, ...]  # the distinct prompts
    prompt_index: np.ndarray  # int32 [N] into prompts: the task may change within an episode

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])

    def rows(self, i: int) -> slice:
        """The rows of the episode at position i."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def episodes_of(self, rows: np.ndarray) -> np.ndarray:
        """The positions of the episodes that have these rows."""
        return np.searchsorted(self.offsets, rows, side="right") - 1


class EpisodeSource(abc.ABC):
    """A dataset as a sequence of episodes.

    Positions 0..len-1 address the usable episodes. `indices[i]` is the dataset's own number of the episode
    at position i, which differs from i once bad episodes were skipped.
    """

    root: Path
    format: str  # e.g. "LeRobot v3.0"
    fps: float
    cameras: tuple[str, ...]
    features: dict[str, Feature]  # columns and cameras
    indices: tuple[int, ...]
    on_bad_episode: OnBadEpisode = "error"
    skipped: tuple[SkippedEpisode, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Episode]:
        return (self.episode(i) for i in range(len(self)))

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """A hash of the dataset that does not depend on where it lies; keys caches and labels."""

    @property
    def column_names(self) -> list[str]:
        """The features that are not cameras."""
        return [name for name in self.features if name not in self.cameras]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len]: steps per episode, from metadata alone."""
        return np.array([self._length(index) for index in self.indices], np.int64)

    def episode(self, i: int) -> Episode:
        """The episode at position i; raises EpisodeError when it is broken."""
        index = self.indices[i]
        table = self._read_episode(index, None)
        return Episode(
            index=index,
            length=table.num_rows,
            prompt=table.prompts[table.prompt_index[0]] if table.num_rows else None,
            columns=table.columns,
            read_frames=lambda camera, ts: self.read_frames(index, camera, ts),
        )

    def read_columns(self, names: Sequence[str] | None = None) -> ColumnTable:
        """Low-dimensional columns (all, or those named) of all episodes; never touches video."""
        self._require_columns(names)
        with ThreadPoolExecutor() as pool:  # parquet decoding and file access release the GIL
            tables = list(pool.map(lambda index: self._read_episode(index, names), self.indices))
        return concatenate_tables(tables)

    def read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        """Frames at steps ts of the episode with the dataset's own number `index`: uint8 [n, h, w, 3]."""
        if camera not in self.cameras:
            raise DatasetError(f"{self.root}: no camera {camera!r}; it has {list(self.cameras)}")
        length = self._length(index)
        if ts.size and (ts.min() < 0 or ts.max() >= length):
            raise IndexError(f"episode {index} has steps 0..{length - 1}, asked for {ts.min()}..{ts.max()}")
        return self._read_frames(index, camera, ts)

    def check(self, index: int) -> int:
        """Raises EpisodeError when columns or file headers of an episode are broken; gives its length."""
        table = self._read_episode(index, None)
        for camera in self.cameras:
            self._check_camera(index, camera)
        return table.num_rows

    def verify(self, index: int) -> None:
        """Raises EpisodeError at any damage of an episode that its format can show; reads and decodes everything."""
        length = self.check(index)
        for camera in self.cameras:
            for ts in step_blocks(length):
                self.read_frames(index, camera, ts)

    def without(self, bad: Mapping[int, str]) -> Self:
        """The same source without the episodes with the given dataset indices (index -> reason)."""
        if not bad:
            return self
        rest = copy.copy(self)
        rest.indices = tuple(index for index in self.indices if index not in bad)
        rest.skipped = self.skipped + tuple(SkippedEpisode(i, bad[i]) for i in self.indices if i in bad)
        return rest

    def require_episodes(self) -> None:
        """Raises DatasetError without usable episodes, and says what was wrong with the first that was left out."""
        if not self.indices:
            count = len(self.skipped)
            why = f"; {count} were left out, the first because: {self.skipped[0].reason}" if count else ""
            raise DatasetError(f"{self.root} has no usable episodes{why}")

    def describe_skipped(self) -> str | None:
        """A warning about the episodes that were left out; None if there are none."""
        if not self.skipped:
            return None
        first, total = self.skipped[0], len(self.skipped) + len(self)
        return (
            f"{len(self.skipped)} of {total} episodes are broken and left out (`acrlpd data validate` lists them), the "
            f"first because: {first.reason}"
        )

    def close(self) -> None:  # noqa: B027 - most formats hold nothing open
        """Closes file handles and decoders; the source may be used again and reopens them."""

    @abc.abstractmethod
    def _length(self, index: int) -> int:
        """Steps of an episode, from metadata."""

    @abc.abstractmethod
    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        """The checked columns of one episode."""

    @abc.abstractmethod
    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        """Frames of one episode; camera and ts are known to exist."""

    @abc.abstractmethod
    def _check_camera(self, index: int, camera: str) -> None:
        """Raises EpisodeError when the frames of a camera cannot all be there; decodes nothing."""

    def _require_columns(self, names: Sequence[str] | None) -> None:
        missing = [name for name in names or () if name not in self.column_names]
        if missing:
            raise DatasetError(f"{self.root}: no column {missing[0]!r}; it has {self.column_names}")


def step_blocks(length: int) -> list[np.ndarray]:
    """The steps of an episode, some at a time, so that a thread holds few frames of the camera's own size."""
    return np.split(np.arange(length), range(_STEPS_PER_BLOCK, length, _STEPS_PER_BLOCK))


def concatenate_tables(tables: Sequence[ColumnTable]) -> ColumnTable:
    """Joins the tables of several episodes into one, with each distinct prompt once."""
    if not tables:
        return ColumnTable({}, np.zeros(1, np.int64), (), np.zeros(0, np.int32))
    prompts: dict[str | None, int] = {}
    prompt_index = []
    for table in tables:
        renumber = np.array([prompts.setdefault(prompt, len(prompts)) for prompt in table.prompts], np.int32)
        prompt_index.append(renumber[table.prompt_index])
    lengths = np.concatenate([np.diff(table.offsets) for table in tables])
    return ColumnTable(
        columns={name: np.concatenate([t.columns[name] for t in tables]) for name in tables[0].columns},
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompts=tuple(prompts),
        prompt_index=np.concatenate(prompt_index),
    )


def open_source(path_or_repo_id: str | Path, *, on_bad_episode: OnBadEpisode = "error") -> EpisodeSource:
    """Opens a LeRobot v2.x / v3.0, ALOHA HDF5 or DROID dataset from a directory or a hub id.

    With "error" (the default) opening stays lazy and a broken episode raises when it is read. With "skip"
    every episode's columns and file headers are checked now; `source.skipped` lists what was left out.
    """
    from acrlpd.data.sources import aloha_hdf5, droid_hdf5, lerobot

    root = _find_dataset(path_or_repo_id)
    source: EpisodeSource
    if (root / "meta" / "info.json").is_file():
        source = lerobot.open_lerobot(root)
    elif any(root.glob("*.hdf5")):
        source = aloha_hdf5.AlohaHdf5Source(root)
    elif any(root.rglob("trajectory.h5")):
        source = droid_hdf5.DroidSource(root)
    else:
        raise DatasetError(
            f"{root}: found neither meta/info.json (LeRobot), *.hdf5 (ALOHA) nor trajectory.h5 (DROID); "
            "give the directory that holds one of these"
        )
    source.on_bad_episode = on_bad_episode
    if on_bad_episode == "skip":
        return source.without({index: problem for index, problem in check_episodes(source, source.check) if problem})
    return source


def _find_dataset(path_or_repo_id: str | Path) -> Path:
    """The local directory of a dataset.

    A hub id is looked for where lerobot keeps its datasets ($HF_LEROBOT_HOME), then in the hub's own
    cache ($HF_HOME), then downloaded there.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise DatasetError(f"{path} is a file; give the dataset's directory")
    repo_id = str(path_or_repo_id)
    if not _REPO_ID.fullmatch(repo_id) or not are_plain_names(repo_id):
        raise DatasetError(f"{path}: no such directory, and not a hub id of the form owner/name either")
    local = _lerobot_home() / repo_id
    return local if local.is_dir() else _download(repo_id)


def _lerobot_home() -> Path:
    hub_home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_LEROBOT_HOME", hub_home / "lerobot")).expanduser()


def _download(repo_id: str) -> Path:
    try:
        return fetch(HubAddress(repo_id, "dataset"))
    except HubError as error:
        raise DatasetError(f"{repo_id}: no such directory here or in {_lerobot_home()}, and {error}") from error


def check_episodes(source: EpisodeSource, check: Callable[[int], object]) -> Iterator[tuple[int, str | None]]:
    """(dataset index, what is wrong or None) of every episode, from an EpisodeError of `check`, which threads call."""

    def problem(index: int) -> str | None:
        try:
            check(index)
        except EpisodeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        yield from zip(source.indices, pool.map(problem, source.indices), strict=True)


def check_columns(columns: Mapping[str, np.ndarray]) -> None:
    """Raises BadDataError without steps, and at the first NaN or infinity, which poison statistics and losses."""
    fix = "repair the episode or open the dataset with on_bad_episode=skip"
    for name, values in columns.items():
        if not len(values):
            raise BadDataError(f"it has no steps; {fix}")
        if not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all():
            continue
        t = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        raise BadDataError(f"column {name!r} is not finite: {np.array2string(values[t], threshold=20)}; {fix}", frame=t)


def check_statistics(columns: Mapping[str, np.ndarray], recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises BadDataError if a column has another min, max, mean or std than was `recorded` with it."""
    for name, statistics in recorded.items():
        if name not in columns or not np.issubdtype(columns[name].dtype, np.floating):
            continue
        values = columns[name].reshape(len(columns[name]), -1).astype(np.float64)
        found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        expected = {key: np.ravel(statistics[key]) for key in found if key in statistics}
        scale = max((np.abs(expected[key]).max() for key in ("min", "max") if key in expected), default=np.inf)
        # Writers add the steps up in single precision, which loses digits with every step.
        rounding = scale * max(1e-5 * len(values) ** 0.5, 1e-7 * len(values))
        for key, numbers in expected.items():
            tolerance = rounding if key in ("mean", "std") else 1e-6 * scale
            if numbers.shape == found[key].shape and (np.abs(numbers - found[key]) > tolerance).any():
                dim = int(np.argmax(np.abs(numbers - found[key])))
                raise BadDataError(
                    f"column {name!r} does not fit its statistics in meta/: the {key} of dim {dim} is "
                    f"{found[key][dim]:.6g}, recorded {numbers[dim]:.6g}; the values or the statistics are damaged"
                )


def check_frame_shape(found: tuple[int, ...], expected: tuple[int, ...], says: str) -> None:
    """Raises BadDataError if frames have another size than `says` says."""
    if found != expected:
        raise BadDataError(f"frames are {list(found)}, {says} {list(expected)}")
