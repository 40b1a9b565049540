"""Where the rows, frames and tasks of an episode lie: one file per episode in LeRobot v2.x, shared files in v3.0."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from acrlpd.data.sources.lerobot import PARQUET_ERRORS, LeRobotSource, Rows
from acrlpd.data.sources.source import BadDataError, ColumnTable, DatasetError, concatenate_tables, locating

_STATS = "stats/"  # columns of v3.0's metadata: stats/<feature>/<statistic>


class LeRobotV2Source(LeRobotSource):
    """A LeRobot v2.0 or v2.1 dataset. An empty `images/` directory that writers leave behind is ignored."""

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        super().__init__(root, info)
        entries = _read_jsonl(root / "meta" / "episodes.jsonl", ("episode_index", "length", "tasks"))
        self._entries = {int(entry["episode_index"]): entry for entry in entries}
        self.indices = tuple(sorted(self._entries))
        expected = info.get("total_episodes", len(self.indices))
        if len(self.indices) != expected:
            raise DatasetError(
                f"{root}/meta/episodes.jsonl: lists {len(self.indices)} episodes, meta/info.json says {expected}"
            )

    def rows(self, index: int) -> Rows:
        path = self._file("data_path", episode_chunk=self._chunk(index), episode_index=index)
        return Rows(path, 0, self._length(index))

    def clip(self, index: int, camera: str) -> tuple[Path, float]:
        path = self._file("video_path", episode_chunk=self._chunk(index), episode_index=index, video_key=camera)
        return path, 0.0

    def episode_tasks(self, index: int) -> list[str]:
        return list(self._entries[index]["tasks"])

    def _length(self, index: int) -> int:
        return int(self._entries[index]["length"])

    def _chunk(self, index: int) -> int:
        return index // int(self.info.get("chunks_size", 1000))

    def _read_tasks(self) -> dict[int, str]:
        entries = _read_jsonl(self.root / "meta" / "tasks.jsonl", ("task_index", "task"))
        return {int(entry["task_index"]): entry["task"] for entry in entries}

    def _statistics(self, index: int) -> Mapping[str, Mapping[str, Any]]:
        return self._episode_statistics.get(index, {})

    @functools.cached_property
    def _episode_statistics(self) -> dict[int, Mapping[str, Mapping[str, Any]]]:
        path = self.root / "meta" / "episodes_stats.jsonl"  # only v2.1 has this file
        entries = _read_jsonl(path, ("episode_index", "stats")) if path.is_file() else []
        return {int(entry["episode_index"]): entry["stats"] for entry in entries}

    def _metadata_files(self) -> list[Path]:
        return [self.root / "meta" / name for name in ("info.json", "episodes.jsonl", "tasks.jsonl")]


def _read_jsonl(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DatasetError(f"{path}: missing; the dataset was not fully written or copied")
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            entries.append({key: entry[key] for key in keys})
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}, line {number}: truncated or damaged ({error!r})") from None
    return entries


class LeRobotV3Source(LeRobotSource):
    """A LeRobot v3.0 dataset.

    Data and video files are cut at their own sizes: the file index of a camera says nothing about the file
    index of the rows or of another camera, so each is looked up by itself.
    """

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        super().__init__(root, info)
        table = self._read_episode_table()
        self._columns = {name: table[name].to_numpy() for name in table.column_names if name != "tasks"}
        self._tasks = table["tasks"] if "tasks" in table.column_names else None
        index = self._columns["episode_index"]
        self._row_of = {int(episode): row for row, episode in enumerate(index)}
        self.indices = tuple(sorted(self._row_of))
        self._file_start = self._first_rows()
        promised = info.get("total_episodes", len(index))
        if len(self.indices) != promised or len(index) != promised:
            raise DatasetError(f"{root}/meta/episodes: lists {len(index)} episodes, meta/info.json says {promised}")

    def rows(self, index: int) -> Rows:
        row = self._row_of[index]
        chunk, file = self._get("data/chunk_index", row), self._get("data/file_index", row)
        path = self._file("data_path", chunk_index=chunk, file_index=file)
        start = self._get("dataset_from_index", row) - self._file_start[chunk, file]
        return Rows(path, start, self._length(index))

    def clip(self, index: int, camera: str) -> tuple[Path, float]:
        row = self._row_of[index]
        path = self._file(
            "video_path",
            video_key=camera,
            chunk_index=self._get(f"videos/{camera}/chunk_index", row),
            file_index=self._get(f"videos/{camera}/file_index", row),
        )
        return path, float(self._columns[f"videos/{camera}/from_timestamp"][row])

    def episode_tasks(self, index: int) -> list[str]:
        return [] if self._tasks is None else self._tasks[self._row_of[index]].as_py() or []

    def read_columns(self, names: Sequence[str] | None = None) -> ColumnTable:
        """Reads each data file once, in whole, instead of once per episode."""
        self._require_columns(names)
        by_file: dict[Path, list[int]] = {}
        for index in self.indices:
            by_file.setdefault(self.rows(index).path, []).append(index)
        tables: dict[int, ColumnTable] = {}
        for indices in by_file.values():
            tables.update(self._read_file(indices, names))
        return concatenate_tables([tables[index] for index in self.indices])

    def _read_file(self, indices: list[int], names: Sequence[str] | None) -> dict[int, ColumnTable]:
        """The tables of episodes that share a data file."""
        rows = {index: self.rows(index) for index in indices}
        path = rows[indices[0]].path
        end = max(r.start + r.length for r in rows.values())
        try:
            whole = self._read_rows(Rows(path, 0, end), self._column_names(names), self._read_row_groups)
            columns = self._to_columns(whole)
        except BadDataError:
            # One bad row spoils the whole file. Reading episode by episode finds the bad one, or avoids it.
            return {index: self._read_episode(index, names) for index in indices}
        tables = {}
        for index, r in rows.items():
            own = {name: values[r.start : r.start + r.length] for name, values in columns.items()}
            with locating(path, index):
                tables[index] = self._checked(index, own, r.length, names)
        return tables

    def _length(self, index: int) -> int:
        return self._get("length", self._row_of[index])

    def _get(self, column: str, row: int) -> int:
        return int(self._columns[column][row])

    def _first_rows(self) -> dict[tuple[int, int], int]:
        """(chunk, file) -> the dataset-wide number of that data file's first row."""
        first: dict[tuple[int, int], int] = {}
        names = ("data/chunk_index", "data/file_index", "dataset_from_index")
        for chunk, file, start in zip(*(self._columns[name].tolist() for name in names), strict=True):
            first[chunk, file] = min(start, first.get((chunk, file), start))
        return first

    def _read_episode_table(self) -> pa.Table:
        files = self._episode_files()
        needed = ["episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index"]
        for camera in self.cameras:
            if self.features[camera].dtype == "video":
                fields = ("chunk_index", "file_index", "from_timestamp")
                needed += [f"videos/{camera}/{field}" for field in fields]
        tables = [_read_meta(path, [*needed, "tasks"]) for path in files]
        for path, table in zip(files, tables, strict=True):
            missing = [name for name in needed if name not in table.column_names]
            if missing:
                raise DatasetError(f"{path}: the column {missing[0]!r} is missing")
        # Files of one dataset may come from several writers, which name and size types differently.
        return pa.concat_tables(tables, promote_options="permissive")

    def _episode_files(self) -> list[Path]:
        files = sorted((self.root / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
        if not files:
            raise DatasetError(f"{self.root}/meta/episodes: no chunk-*/file-*.parquet; copy the whole dataset")
        return files

    def _read_tasks(self) -> dict[int, str]:
        path = self.root / "meta" / "tasks.parquet"
        if not path.is_file():
            raise DatasetError(f"{path}: missing; the dataset was not fully written or copied")
        table = _read_meta(path, None)
        # The task string is a pandas index, whose column name depends on the writer.
        text = [name for name in table.column_names if name != "task_index"]
        if "task_index" not in table.column_names or len(text) != 1:
            raise DatasetError(f"{path}: expected task_index and one text column, found {table.column_names}")
        return dict(zip(table["task_index"].to_pylist(), table[text[0]].to_pylist(), strict=True))

    def _statistics(self, index: int) -> Mapping[str, Mapping[str, Any]]:
        statistics: dict[str, dict[str, Any]] = {}
        for column, values in self._episode_statistics.get(index, {}).items():
            name, _, key = column.removeprefix(_STATS).rpartition("/")
            if column.startswith(_STATS) and values is not None:
                statistics.setdefault(name, {})[key] = values
        return statistics

    @functools.cached_property
    def _episode_statistics(self) -> dict[int, dict[str, Any]]:
        """The rows of the metadata by episode, with the statistics of columns."""
        columns = [f"{_STATS}{name}/{key}" for name in self.features for key in ("min", "max", "mean", "std")]
        tables = [_read_meta(path, ["episode_index", *columns]) for path in self._episode_files()]
        return {row["episode_index"]: row for table in tables for row in table.to_pylist()}

    def _metadata_files(self) -> list[Path]:
        meta = self.root / "meta"
        return [meta / "info.json", meta / "tasks.parquet", *self._episode_files()]


def _read_meta(path: Path, columns: list[str] | None) -> pa.Table:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            return file.read(columns=None if columns is None else [name for name in columns if name in names])
    except PARQUET_ERRORS as error:
        raise DatasetError(f"{path}: not a readable parquet file, truncated or damaged ({error})") from None
