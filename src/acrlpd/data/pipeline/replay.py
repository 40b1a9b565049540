"""The online replay: episodes that the policy lived, one shard on disk each, written once and never changed.

A shard is there in whole or not at all: its frames are written first, and the shard counts when its columns appear
under their name. So a run that is killed loses no finished episode. While the run goes on the replay grows, and the
run reads it as a dataset through the transforms of the prior data.
"""

import dataclasses
import os
import re
import statistics
import threading
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.decoded import DecodedFrames
from acrlpd.data.pipeline.dataset import Dataset, fill_prompts, read_columns
from acrlpd.data.pipeline.rewards import compute_rewards, environment_rewards
from acrlpd.data.sources.source import (
    ColumnTable,
    DatasetError,
    EpisodeError,
    EpisodeSource,
    Feature,
    check_columns,
    concatenate_tables,
    locating,
)
from acrlpd.files import write_atomically

_JPEG_QUALITY = 95
_SHARD = re.compile(r"episode-(\d{8})-(\d+)\.npz")
_PROMPT = "prompt"
_COLUMN = "column/"
_OFFSETS = "frame_offsets/"
# numpy reads the header of an array with Python's own parser. Before Python 3.11.8 two threads that parse at the same
# time may get a SystemError, which would end the run.
_PARSER = threading.Lock()


class ReplayError(DatasetError):
    """An episode could not be written; the episodes before it are safe."""


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
        self.cameras = tuple(name for name, feature in features.items() if feature.dtype in ("video", "image"))
        self.indices = ()
        root.mkdir(parents=True, exist_ok=True)
        self._lengths: dict[int, int] = {}
        self._offsets: dict[tuple[int, str], np.ndarray] = {}
        self.scan()

    @property
    def identity(self) -> str:
        return f"replay {self.indices}"

    def scan(self) -> list[int]:
        """Numbers of all finished episodes on disk, admitted or not, in order."""
        for path in self.root.iterdir():
            if match := _SHARD.fullmatch(path.name):
                self._lengths[int(match[1])] = int(match[2])
        return sorted(self._lengths)

    def write(self, number: int, columns: Mapping[str, np.ndarray], prompt: str) -> None:
        """Makes a finished episode permanent: columns [L, ...] and cameras uint8 [L, h, w, 3]."""
        length = self._check_features(columns)
        arrays: dict[str, Any] = {_PROMPT: prompt}
        arrays |= {f"{_COLUMN}{name}": columns[name] for name in self.features if name not in self.cameras}
        try:
            for camera in self.cameras:
                arrays[f"{_OFFSETS}{camera}"] = self._write_frames(number, camera, columns[camera])
            write_atomically(self._shard(number, length), lambda file: np.savez(file, **arrays))
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
                "restore it or start the run again with --overwrite"
            )
        self.indices += numbers

    def columns(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns [L, ...] of an episode on disk, admitted or not."""
        return self._read_episode(number, names).columns

    def _length(self, index: int) -> int:
        return self._lengths[index]

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        path = self._shard(index, self._lengths[index])
        try:
            with _PARSER, np.load(path, allow_pickle=False) as file:
                prompt = str(file[_PROMPT])
                wanted = (name for name in self.features if name not in self.cameras)
                columns = {name: file[_COLUMN + name] for name in wanted if names is None or name in names}
                for camera in self.cameras:
                    self._offsets[index, camera] = file[_OFFSETS + camera]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise EpisodeError(f"the shard cannot be read: {error}", path=path, episode=index) from error
        with locating(path, index):
            check_columns(columns)
        length = self._lengths[index]
        return ColumnTable(columns, np.array([0, length]), (prompt,), np.zeros(length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        if (index, camera) not in self._offsets:
            self._read_episode(index, [])
        offsets, path = self._offsets[index, camera], self._frames(index, camera)
        frames = np.empty((len(ts), *self.features[camera].shape), np.uint8)
        try:
            # Opened for each read: a run has more episodes than a process may have open files.
            with path.open("rb", buffering=0) as file:
                for frame, t in zip(frames, ts.tolist(), strict=True):
                    jpeg = os.pread(file.fileno(), int(offsets[t + 1] - offsets[t]), int(offsets[t]))
                    simplejpeg.decode_jpeg(jpeg, colorspace="RGB", buffer=frame)
        except (OSError, ValueError) as error:
            raise EpisodeError(f"frames cannot be read: {error}", path=path, episode=index, camera=camera) from error
        return frames

    def _check_camera(self, index: int, camera: str) -> None:
        path = self._frames(index, camera)
        self._read_episode(index, [])
        wanted, found = int(self._offsets[index, camera][-1]), path.stat().st_size if path.exists() else 0
        if found != wanted:
            raise EpisodeError(f"{found} bytes of frames, expected {wanted}", path=path, episode=index, camera=camera)

    def _write_frames(self, number: int, camera: str, frames: np.ndarray) -> np.ndarray:
        """Where each frame starts in the file, and where the last one ends: int64 [L + 1]."""
        jpegs = [simplejpeg.encode_jpeg(np.ascontiguousarray(frame), quality=_JPEG_QUALITY) for frame in frames]
        write_atomically(self._frames(number, camera), lambda file: file.writelines(jpegs))
        return np.concatenate([[0], np.cumsum([len(jpeg) for jpeg in jpegs])]).astype(np.int64)

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
        return self.root / f"episode-{number:08d}-{length}.npz"

    def _frames(self, number: int, camera: str) -> Path:
        return self.root / f"episode-{number:08d}.{camera}.jpegs"


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
        )
        return self._dataset

    def close(self) -> None:
        if self._frames is not None:
            self._frames.close()
