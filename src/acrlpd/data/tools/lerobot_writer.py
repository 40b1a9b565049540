"""Writes LeRobot v3.0 datasets step by step, in bounded memory.

Frames go straight into the encoder; only the low-dimensional columns of the current episode are held. The
layout (file names, metadata columns, parquet schemas) is that of lerobot itself, which reads the result.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from acrlpd.data.sources.source import DatasetError, Feature
from acrlpd.data.tools.lerobot_stats import STATISTICS, DatasetStats, column_stats, image_stats
from acrlpd.data.tools.video_writer import CHUNKS_SIZE, VideoWriter
from acrlpd.files import write_text_atomically

DATA_FILE_MB = 100
VIDEO_FILE_MB = 200
# Image statistics are of every tenth frame, and of every fourth pixel in both directions.
_STATS_FRAMES = 10
_STATS_PIXELS = 4
# Episodes whose metadata is written at once; a row group has a fixed cost per column.
_META_ROWS = 250
_ADDED = {
    "timestamp": Feature("float32", ()),
    "frame_index": Feature("int64", ()),
    "episode_index": Feature("int64", ()),
    "index": Feature("int64", ()),
    "task_index": Feature("int64", ()),
}


class LeRobotWriter:
    """A LeRobot v3.0 dataset that grows step by step and is complete after `close`.

    Files are filled up to lerobot's sizes, with many episodes each.
    """

    def __init__(
        self,
        root: Path,
        *,
        fps: float,
        features: Mapping[str, Feature],
        robot_type: str | None = None,
        codec: str = "libsvtav1",
    ) -> None:
        if root.exists() and any(root.iterdir()):
            raise DatasetError(f"{root}: not empty; write a new dataset into an empty directory")
        self.root = root
        self.fps = fps
        self._robot_type = robot_type
        for name, feature in features.items():
            _check_feature(name, feature)
        self._features = dict(features) | _ADDED
        self._videos = {
            name: VideoWriter(root, name, feature.shape, fps, codec)
            for name, feature in features.items()
            if feature.dtype == "video"
        }
        self._columns = {name: f for name, f in self._features.items() if name not in self._videos}
        self._data = _ParquetFiles(root / "data", _data_schema(self._columns))
        self._meta = _ParquetFiles(root / "meta" / "episodes", _meta_schema(self._features))
        self._meta_rows: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}
        self._stats = DatasetStats()
        self._episodes = 0
        self._frames = 0
        self._begin_episode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_step(self, columns: Mapping[str, Any], frames: Mapping[str, np.ndarray]) -> None:
        """One step: every declared column, and for every camera a uint8 [h, w, 3] frame."""
        self._add_columns(columns, set(frames))
        for camera, frame in frames.items():
            self._add_frame(camera, frame, self._length)
        self._length += 1

    def add_steps(self, columns: Mapping[str, np.ndarray], frames: Mapping[str, np.ndarray]) -> None:
        """Equal to n calls of `add_step`, from arrays [n, ...]. Every camera is encoded in its own thread."""
        lengths = {len(values) for values in (*columns.values(), *frames.values())}
        if len(lengths) != 1:
            raise ValueError(f"columns and cameras must have equally many steps; found {sorted(lengths)}")
        (count,) = lengths
        for t in range(count):
            self._add_columns({name: values[t] for name, values in columns.items()}, set(frames))

        def encode(camera: str) -> None:
            for t, frame in enumerate(frames[camera]):
                self._add_frame(camera, frame, self._length + t)

        with ThreadPoolExecutor(max(1, len(frames))) as threads:
            list(threads.map(encode, frames))
        self._length += count

    def _add_columns(self, columns: Mapping[str, Any], cameras: set[str]) -> None:
        expected = set(self._columns) - set(_ADDED)
        if set(columns) != expected or cameras != set(self._videos):
            wrong = sorted((set(columns) ^ expected) | (cameras ^ set(self._videos)))
            raise ValueError(f"a step must give exactly the declared features; missing or unknown: {wrong}")
        for name, value in columns.items():
            feature = self._columns[name]
            array = np.asarray(value, feature.dtype)
            if array.size != int(np.prod(feature.shape)):
                raise ValueError(f"{name} has shape {list(array.shape)}, declared {list(feature.shape)}")
            self._steps[name].append(array.reshape(feature.shape))

    def _add_frame(self, camera: str, frame: np.ndarray, step: int) -> None:
        self._videos[camera].write(frame)
        if step % _STATS_FRAMES == 0:
            self._samples[camera].append(frame[::_STATS_PIXELS, ::_STATS_PIXELS].copy())

    def end_episode(self, task: str) -> int:
        """Stores the steps since the last end as an episode; returns its index."""
        if not self._length:
            raise ValueError("an episode needs at least one step")
        index, task_index = self._episodes, self._tasks.setdefault(task, len(self._tasks))
        columns = self._episode_columns(index, task_index)
        row = {"episode_index": index, "tasks": [task], "length": self._length}
        row |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + self._length}
        row |= self._data.location("data")
        self._data.write(_to_table(columns, self._data.schema))
        for video in self._videos.values():
            row |= video.end_clip(VIDEO_FILE_MB << 20)
        stats = {camera: image_stats(samples) for camera, samples in self._samples.items()}
        stats |= {name: column_stats(values) for name, values in columns.items()}
        for name, values in stats.items():
            self._stats.add(name, values)
            row |= {f"stats/{name}/{statistic}": values[statistic] for statistic in STATISTICS}
        self._meta_rows.append(row | self._meta.location("meta/episodes"))
        self._episodes += 1
        self._frames += self._length
        self._data.roll(DATA_FILE_MB << 20)
        if len(self._meta_rows) == _META_ROWS:
            self._write_meta_rows()
        self._begin_episode()
        return index

    def discard_episode(self) -> None:
        """Forgets the steps since the last `end_episode`."""
        for video in self._videos.values():
            video.drop_clip()
        self._begin_episode()

    def close(self) -> None:
        """Finishes all files; steps since the last `end_episode` are discarded."""
        self.discard_episode()
        for video in self._videos.values():
            video.close()
        self._data.close()
        self._write_meta_rows()
        self._meta.close()
        self._write_metadata()

    def _begin_episode(self) -> None:
        self._length = 0
        self._steps: dict[str, list[np.ndarray]] = {name: [] for name in self._columns if name not in _ADDED}
        self._samples: dict[str, list[np.ndarray]] = {camera: [] for camera in self._videos}

    def _episode_columns(self, index: int, task_index: int) -> dict[str, np.ndarray]:
        steps = np.arange(self._length, dtype=np.int64)
        return {name: np.stack(values) for name, values in self._steps.items()} | {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(self._length, index, np.int64),
            "index": self._frames + steps,
            "task_index": np.full(self._length, task_index, np.int64),
        }

    def _write_meta_rows(self) -> None:
        if self._meta_rows:
            self._meta.write(pa.Table.from_pylist(self._meta_rows, self._meta.schema))
            self._meta_rows = []
            self._meta.roll(DATA_FILE_MB << 20)

    def _write_metadata(self) -> None:
        meta = self.root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        _write_tasks(meta / "tasks.parquet", list(self._tasks))
        write_text_atomically(meta / "stats.json", json.dumps(self._stats.to_json(), indent=1))
        fps = int(self.fps) if self.fps == int(self.fps) else self.fps
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNKS_SIZE,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": _VIDEO_PATH if self._videos else None,
            "features": {name: self._feature_json(name, f) for name, f in self._features.items()},
        }
        write_text_atomically(meta / "info.json", json.dumps(info, indent=1))

    def _feature_json(self, name: str, feature: Feature) -> dict[str, Any]:
        spec: dict[str, Any] = {"dtype": feature.dtype, "shape": list(feature.shape or (1,)), "names": None}
        if name in self._videos:
            spec |= {"names": ["height", "width", "channels"], "info": self._videos[name].info}
        return spec


_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


class _ParquetFiles:
    """Parquet files of one schema, one after another, a row group per write."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._folder = folder
        self._chunk, self._file = 0, 0
        self._sink: pa.NativeFile | None = None
        self._writer: pq.ParquetWriter | None = None

    def location(self, prefix: str) -> dict[str, int]:
        """Where the next write goes."""
        return {f"{prefix}/chunk_index": self._chunk, f"{prefix}/file_index": self._file}

    def write(self, table: pa.Table) -> None:
        if self._writer is None:
            path = self._folder / f"chunk-{self._chunk:03d}" / f"file-{self._file:03d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(self._sink, self.schema, compression="snappy")
        self._writer.write_table(table)

    def roll(self, max_bytes: int) -> None:
        """Goes on to the next file once this one has `max_bytes`."""
        if self._sink is not None and self._sink.tell() >= max_bytes:
            self.close()

    def close(self) -> None:
        if self._writer is None or self._sink is None:
            return
        self._writer.close()
        self._sink.close()
        self._writer = self._sink = None
        self._file += 1
        if self._file == CHUNKS_SIZE:
            self._chunk, self._file = self._chunk + 1, 0


def _check_feature(name: str, feature: Feature) -> None:
    if name in _ADDED:
        raise ValueError(f"{name!r} is added by the writer; do not declare it")
    if "/" in name:
        raise ValueError(f"{name!r}: LeRobot allows no '/' in the names of features")
    if feature.dtype != "video" and (len(feature.shape) > 1 or np.dtype(feature.dtype).kind not in "fiub"):
        raise ValueError(f"{name!r}: {feature.dtype} {list(feature.shape)} is not a number or a vector of numbers")


def _arrow_type(feature: Feature) -> pa.DataType:
    scalar = pa.from_numpy_dtype(np.dtype(feature.dtype))
    return pa.list_(scalar, feature.shape[0]) if feature.shape else scalar


def _data_schema(columns: Mapping[str, Feature]) -> pa.Schema:
    """Carries the description that the Hugging Face `datasets` library looks for."""
    described = {}
    for name, feature in columns.items():
        value = {"dtype": feature.dtype, "_type": "Value"}
        described[name] = {"feature": value, "length": feature.shape[0], "_type": "List"} if feature.shape else value
    fields = [pa.field(name, _arrow_type(feature)) for name, feature in columns.items()]
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": described}})})


def _meta_schema(features: Mapping[str, Feature]) -> pa.Schema:
    whole = pa.int64()
    fields: list[tuple[str, pa.DataType]] = [("episode_index", whole), ("tasks", pa.list_(pa.string()))]
    fields += [(n, whole) for n in ("length", "data/chunk_index", "data/file_index")]
    fields += [(n, whole) for n in ("dataset_from_index", "dataset_to_index")]
    for camera in (name for name, feature in features.items() if feature.dtype == "video"):
        fields += [(f"videos/{camera}/{n}", whole) for n in ("chunk_index", "file_index")]
        fields += [(f"videos/{camera}/{n}", pa.float64()) for n in ("from_timestamp", "to_timestamp")]
    for name, feature in features.items():
        fields += [(f"stats/{name}/{statistic}", _stats_type(feature, statistic)) for statistic in STATISTICS]
    fields += [(f"meta/episodes/{n}", whole) for n in ("chunk_index", "file_index")]
    return pa.schema(fields)


def _stats_type(feature: Feature, statistic: str) -> pa.DataType:
    if statistic == "count":
        return pa.list_(pa.int64())
    if feature.dtype == "video":
        return pa.list_(pa.list_(pa.list_(pa.float64())))
    if statistic in ("min", "max"):
        kind = np.dtype(feature.dtype).kind
        return pa.list_({"b": pa.bool_(), "i": pa.int64(), "u": pa.int64()}.get(kind, pa.float64()))
    return pa.list_(pa.float64())


def _to_table(columns: Mapping[str, np.ndarray], schema: pa.Schema) -> pa.Table:
    arrays = []
    for field in schema:
        values = pa.array(columns[field.name].reshape(-1))
        if pa.types.is_fixed_size_list(field.type):
            values = pa.FixedSizeListArray.from_arrays(values, type=field.type)
        arrays.append(values)
    return pa.Table.from_arrays(arrays, schema=schema)


def _write_tasks(path: Path, tasks: list[str]) -> None:
    """The task in words is a pandas index, as lerobot writes it."""
    index = "__index_level_0__"
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.large_string())})
    whole = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    text = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    described = [
        {"name": "task_index", "field_name": "task_index"} | whole,
        {"name": None, "field_name": index} | text,
    ]
    pandas = {"index_columns": [index], "column_indexes": [], "columns": described}
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)
