"""The online replay: episodes that the policy lived, one shard on disk each, written once and never changed.

A shard is there in whole or not at all: its frames are written first, and the shard counts when its columns appear
under their name. So a run that is killed loses no finished episode. The file of the columns ends with its own checksum
and holds one checksum for each frame; both are compared whenever something is read. While the run goes on the replay
grows, and the run reads it as a dataset through the transforms of the prior data.
"""

import dataclasses
import io
import os
import re
import statistics
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from acrlpd.checksums import read_with_checksum, short_checksum, write_with_checksum
from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.decoded import DecodedFrames
from acrlpd.data.pipeline.config_episodes import fill_prompts, read_columns
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.data.pipeline.rewards import compute_rewards, environment_rewards
from acrlpd.data.sources.source import (
    BadDataError,
    ColumnTable,
    DatasetError,
    EpisodeError,
    EpisodeSource,
    Feature,
    check_columns,
    concatenate_tables,
    locating,
)
from acrlpd.files import path_within, write_atomically

_JPEG_QUALITY = 95
_SHARD = re.compile(r"episode-(\d{8})-(\d+)\.npz")
_PROMPT = "prompt"
_COLUMN = "column/"
_OFFSETS = "frame_offsets/"
_CHECKSUMS = "frame_checksums/"
# What to do about a file that is missing or damaged.
RESTORE = "restore it or start the run again with --overwrite"
# numpy reads the header of an array with Python's own parser. Before Python 3.11.8 two threads that parse at the same
# time may get a SystemError, which would end the run.
_PARSER = threading.Lock()


class ReplayError(DatasetError):
    """An episode could not be written; the episodes before it are safe."""


@dataclasses.dataclass(frozen=True)
class _Shard:
    """What the file of an episode holds."""

    prompt: str
    columns: dict[str, np.ndarray]  # name -> [L, ...]
    offsets: dict[str, np.ndarray]  # camera -> where each frame starts and where the last one ends, int64 [L + 1]
    checksums: dict[str, np.ndarray]  # camera -> of each frame, uint64 [L]


class Replay(EpisodeSource):
    """Episodes of one run by their numbers.

    Any process may `write` an episode with a new number. `admit` decides which numbers are part of the source, so that
    a resumed run sees the episodes it saw before and not later ones. Cameras are kept as JPEG.
    """

    format = "replay"

    def __init__(self, root: Path, features: Mapping[str, Feature], fps: float) -> None:
        """`features` are the columns and cameras of every episode."""
        self.root = root
        self.fps = fps
        self.features = dict(features)
        self.cameras = tuple(name for name, feature in features.items() if feature.is_camera)
        self.indices = ()
        for camera in self.cameras:
            self._frames(0, camera)  # refuses a name that leads elsewhere before an episode is played
        root.mkdir(parents=True, exist_ok=True)
        self._lengths: dict[int, int] = {}
        self._shards: dict[int, _Shard] = {}  # where the frames of an episode lie; without columns
        self.scan()

    @property
    def identity(self) -> str:
        return f"replay {self.indices}"

    def scan(self) -> list[int]:
        """Numbers of all finished episodes on disk, admitted or not, in order."""
        for path in self.root.iterdir():
            if match := _SHARD.fullmatch(path.name):
                number, length = int(match[1]), int(match[2])
                known = self._lengths.setdefault(number, length)
                if known != length:
                    raise ReplayError(_two_shards(self._shard(number, known), path))
        return sorted(self._lengths)

    def write(self, number: int, columns: Mapping[str, np.ndarray], prompt: str) -> None:
        """Makes a finished episode permanent: columns [L, ...] and cameras uint8 [L, h, w, 3]."""
        length = self._check_features(columns)
        arrays: dict[str, Any] = {_PROMPT: prompt}
        arrays |= {f"{_COLUMN}{name}": columns[name] for name in self.column_names}
        try:
            for camera in self.cameras:
                offsets, checksums = self._write_frames(number, camera, columns[camera])
                arrays |= {f"{_OFFSETS}{camera}": offsets, f"{_CHECKSUMS}{camera}": checksums}
            content = io.BytesIO()
            np.savez(content, **arrays)
            write_with_checksum(self._shard(number, length), content.getvalue())
        except OSError as error:
            raise ReplayError(
                f"{self.root}: episode {number} could not be written ({error.strerror or error}). The "
                f"{len(self._lengths)} episodes before it are complete; free some space and go on with --resume"
            ) from error
        self._lengths[number] = length

    def admit(self, numbers: Iterable[int]) -> None:
        """Adds episodes that are on disk to the source, in this order."""
        numbers = tuple(numbers)
        missing = [number for number in numbers if number not in self._lengths]
        if missing:
            raise DatasetError(
                f"{self.root}: the file of episode {missing[0]} is missing, episode-{missing[0]:08d}-<steps>.npz; "
                f"{RESTORE}"
            )
        self.indices += numbers

    def columns(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns [L, ...] of an episode on disk, admitted or not."""
        return self._read_episode(number, names).columns

    def _length(self, index: int) -> int:
        return self._lengths[index]

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        length = self._lengths[index]
        path = self._shard(index, length)
        wanted = [name for name in self.column_names if names is None or name in names]
        with locating(path, index):
            shard = _read_shard(path, length, wanted)
            check_columns(shard.columns)
            missing = [camera for camera in self.cameras if camera not in shard.offsets]
            if missing:
                raise BadDataError(f"the shard has no frames of camera {missing[0]!r}; {RESTORE}")
        self._shards[index] = dataclasses.replace(shard, columns={})
        return ColumnTable(shard.columns, np.array([0, length]), (shard.prompt,), np.zeros(length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        path = self._frames(index, camera)
        frames = np.empty((len(ts), *self.features[camera].shape), np.uint8)
        with locating(path, index, camera):
            jpegs = _read_jpegs(path, self._known(index), camera, ts)
            for frame, t, jpeg in zip(frames, ts.tolist(), jpegs, strict=True):
                try:
                    simplejpeg.decode_jpeg(jpeg, colorspace="RGB", buffer=frame)
                except ValueError as error:  # a frame of another size
                    raise BadDataError(f"the frame cannot be decoded: {error}; {RESTORE}", frame=t) from None
        return frames

    def _known(self, index: int) -> _Shard:
        """Where the frames of an episode lie, and their checksums."""
        if index not in self._shards:
            self._read_episode(index, [])
        return self._shards[index]

    def _check_camera(self, index: int, camera: str) -> None:
        path = self._frames(index, camera)
        with locating(path, index, camera):
            _check_frames(path, self._known(index), camera)

    def _write_frames(self, number: int, camera: str, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each frame starts in the file and where the last one ends, int64 [L + 1]; checksums, uint64 [L]."""
        jpegs = [simplejpeg.encode_jpeg(np.ascontiguousarray(frame), quality=_JPEG_QUALITY) for frame in frames]
        write_atomically(self._frames(number, camera), lambda file: file.writelines(jpegs))
        offsets = np.concatenate([[0], np.cumsum([len(jpeg) for jpeg in jpegs])]).astype(np.int64)
        return offsets, np.array([short_checksum(jpeg) for jpeg in jpegs], np.uint64)

    def _check_features(self, columns: Mapping[str, np.ndarray]) -> int:
        """The number of steps, which all columns must have."""
        lengths = {name: len(column) for name, column in columns.items()}
        length = statistics.mode(lengths.values())
        for name, feature in self.features.items():
            found = columns[name].shape[1:] if name in columns else None
            if found != feature.shape:
                raise ReplayError(f"{self.root}: {name} must have shape {feature.shape} per step; found {found}")
            if lengths[name] != length:
                raise ReplayError(f"{self.root}: {name} has {lengths[name]} steps, the others {length}")
        return length

    def _shard(self, number: int, length: int) -> Path:
        return self.root / shard_name(number, length)

    def _frames(self, number: int, camera: str) -> Path:
        return _frames_file(self.root, number, camera)


def shard_name(number: int, length: int) -> str:
    """The name of the file with the columns of an episode."""
    return f"episode-{number:08d}-{length}.npz"


def episode_number(name: str) -> int | None:
    """The number of the episode that a file of a replay belongs to; None for other files."""
    match = re.match(r"episode-(\d{8})[-.]", name)
    return None if match is None else int(match[1])


def _frames_file(root: Path, number: int, camera: str) -> Path:
    return path_within(root, f"episode-{number:08d}.{camera}.jpegs", f"the file of camera {camera!r}")


def _two_shards(first: Path, second: Path) -> str:
    return f"{first} and {second} are both the same episode; remove the file that is not of this run"


def _read_shard(path: Path, length: int, names: Sequence[str] | None = None) -> _Shard:
    """The file of an episode with the named columns, or with all columns. Raises BadDataError if it is damaged."""
    try:
        content = io.BytesIO(read_with_checksum(path))
        with _PARSER, np.load(content, allow_pickle=False) as file:
            parts = {
                kind: {key.removeprefix(kind): file[key] for key in file if key.startswith(kind)}
                for kind in (_OFFSETS, _CHECKSUMS)
            }
            columns = [key.removeprefix(_COLUMN) for key in file if key.startswith(_COLUMN)]
            shard = _Shard(
                prompt=str(file[_PROMPT]),
                columns={name: file[_COLUMN + name] for name in (columns if names is None else names)},
                offsets=parts[_OFFSETS],
                checksums=parts[_CHECKSUMS],
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadDataError(f"the shard cannot be read: {error}; {RESTORE}") from error
    for name, values in (*shard.columns.items(), *shard.checksums.items()):
        if len(values) != length:
            raise BadDataError(f"{name} has {len(values)} steps, the name of the file says {length}; {RESTORE}")
    return shard


def _read_jpegs(path: Path, shard: _Shard, camera: str, ts: np.ndarray) -> Iterator[bytes]:
    """The encoded frames of the steps. Raises BadDataError at a frame that is not what was written."""
    offsets, checksums = shard.offsets[camera], shard.checksums[camera]
    try:
        # Opened for each read: a run has more episodes than a process may have open files.
        with path.open("rb", buffering=0) as file:
            for t in ts.tolist():
                jpeg = os.pread(file.fileno(), int(offsets[t + 1] - offsets[t]), int(offsets[t]))
                if short_checksum(jpeg) != checksums[t]:
                    raise BadDataError(f"the frame does not match its checksum; {RESTORE}", frame=t)
                yield jpeg
    except OSError as error:
        raise BadDataError(f"frames cannot be read: {error}; {RESTORE}") from error


def _check_frames(path: Path, shard: _Shard, camera: str) -> None:
    """Raises BadDataError unless the file holds the frames of a camera and nothing else."""
    for _ in _read_jpegs(path, shard, camera, np.arange(len(shard.checksums[camera]))):
        pass
    wanted, found = int(shard.offsets[camera][-1]), path.stat().st_size
    if found != wanted:
        raise BadDataError(f"{found} bytes of frames, expected {wanted}; {RESTORE}")


def verify_replay(directory: Path) -> Iterator[str]:
    """What is wrong with the episodes of the replay in `directory`: one text for each damaged file, with its name.

    Reads every byte. A directory that does not exist has no episodes.
    """
    shards: dict[int, Path] = {}
    for path in sorted(directory.glob("episode-*.npz")):
        match = _SHARD.fullmatch(path.name)
        if match is None:
            yield f"{path}: an episode is named episode-<number>-<steps>.npz; rename or remove this file"
            continue
        number, length = int(match[1]), int(match[2])
        if shards.setdefault(number, path) != path:
            yield _two_shards(shards[number], path)
        try:
            with locating(path, number):
                shard = _read_shard(path, length)
                check_columns(shard.columns)
        except EpisodeError as error:
            yield str(error)
            continue
        for camera in shard.offsets:
            try:
                with locating(frames := _frames_file(directory, number, camera), number, camera):
                    _check_frames(frames, shard, camera)
            except ValueError as error:  # an EpisodeError, or the name of a camera that is no name of a file
                yield str(error)


class ReplayDataset:
    """Admitted episodes of a replay as a `Dataset`."""

    def __init__(self, replay: Replay, rl_config: RLTrainConfig, prior: Dataset) -> None:
        """Rewards are of the same kind as those of the `prior` data."""
        self.replay = replay
        self._dataset: Dataset | None = None
        self._config = rl_config.data
        self._rewards = environment_rewards(rl_config.data.rewards, prior.rewards.origin)
        self._prior = prior
        like = prior.frames
        self._frames = None if like is None else DecodedFrames(replay, like.cameras, like.height, like.width)

    def admit(self, numbers: Sequence[int]) -> Dataset:
        """Adds episodes that are on disk, in this order; returns the dataset with all episodes added so far."""
        seen = len(self.replay)
        self.replay.admit(numbers)
        new = self.replay.without(dict.fromkeys(self.replay.indices[:seen], "known"))
        table = read_columns(new, dataclasses.replace(self._config, rewards=self._rewards), rewards=True)
        if self._dataset is not None:
            table = concatenate_tables([self._dataset.table, table])
        self._dataset = dataclasses.replace(
            self._prior,
            source=self.replay,
            frames=self._frames,
            table=table,
            rewards=compute_rewards(table, self.replay.indices, self._rewards, None),
            prompts=None if self._prior.prompts is None else fill_prompts(self.replay, table, self._config),
            held_out=None,
        )
        return self._dataset

    def close(self) -> None:
        if self._frames is not None:
            self._frames.close()
