"""Writes LeRobot v3.0 datasets step by step, in bounded memory.

Frames go straight into the encoder; only the low-dimensional columns of the current episode are held. The
layout (file names, metadata columns, parquet schemas) is that of lerobot itself, which reads the result.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from acrlpd.data.sources.source import DatasetError, Episode, Feature, step_blocks
from acrlpd.data.tools.video_writer import CHUNKS_SIZE, FILE_NAME, VideoWriter, file_indices, make_file_path
from acrlpd.files import is_plain_name, write_text_atomically

DATA_FILE_MB = 100
VIDEO_FILE_MB = 200
# Image statistics are of every tenth frame, and of every fourth pixel in both directions.
_STATS_FRAMES = 10
_STATS_PIXELS = 4
# Episodes whose metadata is written at once; a row group has a fixed cost per column.
_META_ROWS = 250
_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_STATISTICS = ("min", "max", "mean", "std", "count", *_QUANTILES)
_ROW_NUMBERS = ("frame_index", "episode_index", "index", "task_index")
# LeRobot numbers rows itself.
ADDED = {"timestamp": Feature("float32", ())} | dict.fromkeys(_ROW_NUMBERS, Feature("int64", ()))

Stats = dict[str, list[Any]]


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
        self.fps = int(fps) if fps == int(fps) else fps
        self._robot_type = robot_type
        for name, feature in features.items():
            _check_feature(name, feature)
        self._features = dict(features) | ADDED
        self._videos = {
            name: VideoWriter(root, name, feature.shape, self.fps, codec)
            for name, feature in features.items()
            if feature.dtype == "video"
        }
        self._columns = {name: f for name, f in self._features.items() if name not in self._videos}
        self._schema = _data_schema(self._columns)
        self._data = _ParquetFiles(root / "data")
        self._meta = _ParquetFiles(root / "meta" / "episodes")
        self._meta_rows: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}
        self._stats = _DatasetStats()
        self._episodes = 0
        self._frames = 0
        self._begin_episode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_step(self, columns: Mapping[str, Any], frames: Mapping[str, np.ndarray]) -> None:
        """One step: every declared column, and for every camera a uint8 [h, w, 3] frame."""
        self.add_steps(
            {name: np.asarray(value)[None] for name, value in columns.items()},
            {camera: frame[None] for camera, frame in frames.items()},
        )

    def add_steps(self, columns: Mapping[str, np.ndarray], frames: Mapping[str, np.ndarray]) -> None:
        """Several steps from arrays [n, ...]. Every camera is encoded in its own thread."""
        wrong = sorted((columns.keys() ^ self._steps.keys()) | (frames.keys() ^ self._videos.keys()))
        if wrong:
            raise ValueError(f"a step must give exactly the declared features; missing or unknown: {wrong}")
        lengths = {len(values) for values in (*columns.values(), *frames.values())}
        if len(lengths) != 1:
            raise ValueError(f"columns and cameras must have equally many steps; found {sorted(lengths)}")
        (count,) = lengths
        for name, values in columns.items():
            feature = self._columns[name]
            array = np.array(values, feature.dtype)
            if array.size != count * int(np.prod(feature.shape)):
                raise ValueError(f"{name} has shape {list(array.shape[1:])}, declared {list(feature.shape)}")
            self._steps[name].append(array.reshape(count, *feature.shape))

        def encode(camera: str) -> None:
            for step, frame in enumerate(frames[camera], self._length):
                self._videos[camera].write(frame)
                if step % _STATS_FRAMES == 0:
                    self._samples[camera].append(frame[::_STATS_PIXELS, ::_STATS_PIXELS].copy())

        with ThreadPoolExecutor(max(1, len(frames))) as threads:
            list(threads.map(encode, frames))
        self._length += count

    def add_episode(
        self, episode: Episode, columns: Mapping[str, np.ndarray], cameras: Sequence[str], task: str
    ) -> None:
        """A whole episode with these columns [length, ...] and these of its cameras, a block of frames at a time."""
        for ts in step_blocks(episode.length):
            self.add_steps(
                {name: values[ts] for name, values in columns.items()},
                {camera: episode.frames(camera, ts) for camera in cameras},
            )
        self.end_episode(task)

    def end_episode(self, task: str) -> int:
        """Stores the steps since the last end as an episode; returns its index."""
        if not self._length:
            raise ValueError("an episode needs at least one step")
        index, task_index = self._episodes, self._tasks.setdefault(task, len(self._tasks))
        steps = np.arange(self._length, dtype=np.int64)
        columns = {name: np.concatenate(values) for name, values in self._steps.items()} | {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full_like(steps, index),
            "index": self._frames + steps,
            "task_index": np.full_like(steps, task_index),
        }
        row = {"episode_index": index, "tasks": [task], "length": self._length}
        row |= self._data.location("data")
        row |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + self._length}
        self._data.write(_to_table(columns, self._schema), DATA_FILE_MB << 20)
        for video in self._videos.values():
            row |= video.end_clip(VIDEO_FILE_MB << 20)
        for name in self._features:
            stats = _image_stats(self._samples[name]) if name in self._videos else column_stats(columns[name])
            self._stats.add(name, stats)
            row |= {f"stats/{name}/{statistic}": stats[statistic] for statistic in _STATISTICS}
        self._meta_rows.append(row | self._meta.location("meta/episodes"))
        self._episodes += 1
        self._frames += self._length
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
        self._steps: dict[str, list[np.ndarray]] = {name: [] for name in self._columns if name not in ADDED}
        self._samples: dict[str, list[np.ndarray]] = {camera: [] for camera in self._videos}

    def _write_meta_rows(self) -> None:
        if self._meta_rows:
            self._meta.write(pa.Table.from_pylist(self._meta_rows), DATA_FILE_MB << 20)
            self._meta_rows = []

    def _write_metadata(self) -> None:
        meta = self.root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        _write_tasks(meta / "tasks.parquet", list(self._tasks))
        write_text_atomically(meta / "stats.json", json.dumps(self._stats.to_json(), indent=1))
        features: dict[str, dict[str, Any]] = {}
        for name, feature in self._features.items():
            features[name] = {"dtype": feature.dtype, "shape": list(feature.shape or (1,)), "names": None}
            if name in self._videos:
                features[name] |= {"names": ["height", "width", "channels"], "info": self._videos[name].info}
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNKS_SIZE,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": f"data/{FILE_NAME}.parquet",
            "video_path": f"videos/{{video_key}}/{FILE_NAME}.mp4" if self._videos else None,
            "features": features,
        }
        write_text_atomically(meta / "info.json", json.dumps(info, indent=1))


class _ParquetFiles:
    """Parquet files of one schema, one after another, a row group per write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full_files = 0
        self._sink: pa.NativeFile | None = None
        self._writer: pq.ParquetWriter | None = None

    def location(self, prefix: str) -> dict[str, int]:
        """Where the next write goes."""
        return {f"{prefix}/{name}": index for name, index in file_indices(self._full_files).items()}

    def write(self, table: pa.Table, max_bytes: int) -> None:
        """Writes into the file in use, which takes no further write once it has `max_bytes`."""
        if self._writer is None or self._sink is None:
            path = make_file_path(self._folder, self._full_files, ".parquet")
            self._sink = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(self._sink, table.schema, compression="snappy", write_page_checksum=True)
        self._writer.write_table(table)
        if self._sink.tell() >= max_bytes:
            self.close()

    def close(self) -> None:
        if self._writer is None or self._sink is None:
            return
        self._writer.close()
        self._sink.close()
        self._writer = self._sink = None
        self._full_files += 1


def _check_feature(name: str, feature: Feature) -> None:
    if name in ADDED:
        raise ValueError(f"{name!r} is added by the writer; do not declare it")
    if not is_plain_name(name):
        raise ValueError(f"{name!r}: LeRobot allows no '/' in the names of features, and the name must be printable")
    if feature.dtype != "video" and (len(feature.shape) > 1 or np.dtype(feature.dtype).kind not in "fiub"):
        raise ValueError(f"{name!r}: {feature.dtype} {list(feature.shape)} is not a number or a vector of numbers")


def _data_schema(columns: Mapping[str, Feature]) -> pa.Schema:
    """Carries the description that the Hugging Face `datasets` library looks for."""
    described: dict[str, Any] = {}
    fields: dict[str, pa.DataType] = {}
    for name, feature in columns.items():
        fields[name] = pa.from_numpy_dtype(np.dtype(feature.dtype))
        described[name] = {"dtype": feature.dtype, "_type": "Value"}
        if feature.shape:
            fields[name] = pa.list_(fields[name], feature.shape[0])
            described[name] = {"feature": described[name], "length": feature.shape[0], "_type": "List"}
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": described}})})


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
    table = table.replace_schema_metadata({"pandas": json.dumps(pandas)})
    pq.write_table(table, path, write_page_checksum=True)


def column_stats(values: np.ndarray) -> Stats:
    """Statistics over the steps of one episode; values [length] or [length, n]."""
    values = values.reshape(len(values), -1)
    numbers = values.astype(np.float64)
    stats = {
        "min": values.min(axis=0).tolist(),
        "max": values.max(axis=0).tolist(),
        "mean": numbers.mean(axis=0).tolist(),
        "std": numbers.std(axis=0).tolist(),
        "count": [len(values)],
    }
    quantiles = np.quantile(numbers, list(_QUANTILES.values()), axis=0)
    return stats | dict(zip(_QUANTILES, quantiles.tolist(), strict=True))


def _image_stats(samples: Sequence[np.ndarray]) -> Stats:
    """Statistics per channel of samples [h, w, 3] in [0, 1]; each is shaped [[[r]], [[g]], [[b]]]."""
    pixels = np.concatenate([sample.reshape(-1, 3) for sample in samples]) / 255.0
    stats = column_stats(pixels)
    channels: Stats = {name: [[[value]] for value in stats[name]] for name in _STATISTICS if name != "count"}
    return channels | {"count": [len(samples)]}


class _DatasetStats:
    """Statistics of all episodes, from those of each episode: exact, except that quantiles are averaged."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, np.ndarray]] = {}

    def add(self, name: str, stats: Stats) -> None:
        count = float(stats["count"][0])
        mean, std = np.asarray(stats["mean"], np.float64), np.asarray(stats["std"], np.float64)
        new = {"min": np.asarray(stats["min"]), "max": np.asarray(stats["max"]), "count": np.array(count)}
        new |= {q: count * np.asarray(stats[q], np.float64) for q in _QUANTILES}
        new |= {"mean": count * mean, "square": count * (std**2 + mean**2)}
        old = self._sums.get(name)
        if old is not None:
            combine = {"min": np.minimum, "max": np.maximum}
            new = {key: combine.get(key, np.add)(old[key], value) for key, value in new.items()}
        self._sums[name] = new

    def to_json(self) -> dict[str, Stats]:
        statistics: dict[str, Stats] = {}
        for name, sums in self._sums.items():
            means = {key: total / sums["count"] for key, total in sums.items() if key not in ("min", "max", "count")}
            std = np.sqrt(np.maximum(means.pop("square") - means["mean"] ** 2, 0))
            found = {"min": sums["min"], "max": sums["max"], "std": std, **means}
            statistics[name] = {key: value.tolist() for key, value in found.items()} | {"count": [int(sums["count"])]}
        return statistics
