"""What LeRobot v2.x and v3.0 datasets share: info.json, features, parquet columns, videos and images."""

import abc
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from acrlpd.data.sources.source import (
    BadDataError,
    ColumnTable,
    DatasetError,
    EpisodeSource,
    Feature,
    check_columns,
    check_frame_shape,
    check_statistics,
    locating,
)
from acrlpd.data.sources.video import VideoPool, read_video_frames
from acrlpd.files import path_within

# Row groups that are kept in memory: lerobot's converter puts all episodes of a file into one row group.
_ROW_GROUPS = 2
# Blocks of encoded images that are kept in memory; a block holds one episode of one camera.
_IMAGE_BLOCKS = 8
# What pyarrow raises on a damaged file; a name of a column in its footer may no longer be text.
PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the steps of an episode lie in a parquet file."""

    path: Path
    start: int
    length: int


class LeRobotSource(EpisodeSource):
    """A LeRobot dataset; the versions differ in where an episode's rows and clips lie."""

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        self.root = root
        self.info = info
        self.format = f"LeRobot {info['codebase_version']}"
        self.fps = float(info["fps"])
        # Text columns are left out: the policy gets its text as the task.
        specs = {name: spec for name, spec in info["features"].items() if spec["dtype"] not in _TEXT}
        self.features = {name: _feature(spec) for name, spec in specs.items()}
        self.cameras = tuple(name for name, feature in self.features.items() if feature.is_camera)
        self.tasks = self._read_tasks()
        self._videos = VideoPool()
        self._parquet = functools.lru_cache(maxsize=256)(_read_layout)
        self._row_groups = functools.lru_cache(maxsize=_ROW_GROUPS)(self._read_row_groups)
        self._image_block = functools.lru_cache(maxsize=_IMAGE_BLOCKS)(self._read_image_block)

    @abc.abstractmethod
    def rows(self, index: int) -> Rows: ...

    @abc.abstractmethod
    def clip(self, index: int, camera: str) -> tuple[Path, float]:
        """The video file with the frames of an episode, and the second at which they begin."""

    @abc.abstractmethod
    def episode_tasks(self, index: int) -> list[str]:
        """The tasks that the metadata names for an episode."""

    @abc.abstractmethod
    def _read_tasks(self) -> dict[int, str]:
        """task_index -> the task in words."""

    @abc.abstractmethod
    def _statistics(self, index: int) -> Mapping[str, Mapping[str, Any]]:
        """What the metadata records about the columns of an episode: name -> min, max, mean, std; may be empty."""

    @abc.abstractmethod
    def _metadata_files(self) -> list[Path]:
        """The files that list the episodes; their content is part of the identity of the dataset."""

    @functools.cached_property
    def identity(self) -> str:
        """Hash of the metadata and of the names and sizes of all data and video files."""
        digest = hashlib.sha256()
        for path in self._metadata_files():
            digest.update(path.read_bytes())
        for folder in ("data", "videos"):
            for path in sorted(p for p in (self.root / folder).rglob("*.*") if p.is_file()):
                digest.update(f"{path.relative_to(self.root)} {path.stat().st_size}\n".encode())
        return digest.hexdigest()[:32]

    def verify(self, index: int) -> None:
        super().verify(index)
        with locating(self.rows(index).path, index):
            check_statistics(self._read_episode(index, None).columns, self._statistics(index))

    def _file(self, key: str, **fields: str | int) -> Path:
        """The file that a template of meta/info.json (data_path, video_path) names."""
        template: Any = self.info.get(key)
        try:
            return path_within(self.root, _fill(template, fields), key)
        except ValueError as error:
            raise DatasetError(
                f"{self.root}/meta/info.json: {key} is {template!r:.200}, expected a path made of {', '.join(fields)} "
                f"within the dataset ({error})"
            ) from None

    def close(self) -> None:
        self._videos.close()
        self._parquet.cache_clear()
        self._row_groups.cache_clear()
        self._image_block.cache_clear()

    def _column_names(self, names: Sequence[str] | None) -> list[str]:
        wanted = self.column_names if names is None else names
        return list(dict.fromkeys([*wanted, *_BOOKKEEPING]))

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        rows = self.rows(index)
        with locating(rows.path, index):
            columns = self._to_columns(self._read_rows(rows, self._column_names(names), self._row_groups))
            return self._checked(index, columns, rows.length, names)

    def _to_columns(self, table: pa.Table) -> dict[str, np.ndarray]:
        return {name: _to_numpy(name, table[name], self.features.get(name)) for name in table.column_names}

    def _checked(
        self, index: int, columns: dict[str, np.ndarray], length: int, names: Sequence[str] | None
    ) -> ColumnTable:
        """The table of one episode, after every check that needs no video."""
        self._check_bookkeeping(index, columns, length)
        check_columns(columns)
        prompts, prompt_index = self._prompts(index, columns, length)
        if names is not None:
            columns = {name: columns[name] for name in names}
        return ColumnTable(columns, np.array([0, length], np.int64), prompts, prompt_index)

    def _check_bookkeeping(self, index: int, columns: dict[str, np.ndarray], length: int) -> None:
        steps = np.arange(length)
        expected = {
            "episode_index": (np.full(length, index), 0.5),
            "frame_index": (steps, 0.5),
            "timestamp": (steps / self.fps, 0.5 / self.fps),
        }
        for name, (values, tolerance) in expected.items():
            if name not in columns:
                continue
            wrong = np.flatnonzero(~(np.abs(columns[name] - values) < tolerance))
            if wrong.size:
                t = int(wrong[0])
                raise BadDataError(
                    f"{name} is {columns[name][t]:g}, expected {values[t]:g}: rows and metadata disagree", frame=t
                )

    def _prompts(
        self, index: int, columns: dict[str, np.ndarray], length: int
    ) -> tuple[tuple[str | None, ...], np.ndarray]:
        if "task_index" not in columns:
            tasks = self.episode_tasks(index)
            return (tasks[0] if tasks else None,), np.zeros(length, np.int32)
        used, where = np.unique(columns["task_index"], return_inverse=True)
        unknown = [task for task in used.tolist() if task not in self.tasks]
        if unknown:
            raise BadDataError(
                f"task_index {unknown[0]} is not among the {len(self.tasks)} tasks of {self.root}/meta",
                frame=int(np.flatnonzero(columns["task_index"] == unknown[0])[0]),
            )
        return tuple(self.tasks[task] for task in used.tolist()), where.astype(np.int32)

    def _read_rows(
        self, rows: Rows, names: Sequence[str], read: Callable[[Path, int, int, tuple[str, ...]], pa.Table]
    ) -> pa.Table:
        """The named columns of an episode, from the row groups that hold them."""
        try:
            file = self._parquet(rows.path)
            if rows.start + rows.length > file.starts[-1]:
                raise BadDataError(
                    f"the metadata puts its {rows.length} steps at rows {rows.start}..{rows.start + rows.length - 1}, "
                    f"the file has {file.starts[-1]} rows"
                )
            missing = [name for name in names if name not in file.columns and name not in _BOOKKEEPING]
            if missing:
                raise BadDataError(f"column {missing[0]!r} of meta/info.json is not in the file")
            first = int(np.searchsorted(file.starts, rows.start, side="right")) - 1
            last = max(first, int(np.searchsorted(file.starts, rows.start + rows.length)))
            table = read(rows.path, first, last, tuple(name for name in names if name in file.columns))
            return table.slice(rows.start - int(file.starts[first]), rows.length)
        except FileNotFoundError:
            raise BadDataError("the data file is missing") from None
        except PARQUET_ERRORS as error:
            raise BadDataError(f"not a readable parquet file, truncated or damaged ({error})") from None

    def _read_row_groups(self, path: Path, first: int, last: int, names: tuple[str, ...]) -> pa.Table:
        footer = self._parquet(path).footer
        with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
            return file.read_row_groups(list(range(first, last)), columns=list(names), use_threads=False)

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        if self.features[camera].dtype == "image":
            return self._read_images(index, camera, ts)
        path, start = self.clip(index, camera)
        with locating(path, index, camera):
            frames = read_video_frames(self._videos, path, ts, start=start, fps=self.fps)
            check_frame_shape(frames.shape[1:], self.features[camera].shape, _DECLARED)
        return frames

    def _check_camera(self, index: int, camera: str) -> None:
        if self.features[camera].dtype == "image":
            self._image_block(index, camera)
            return
        path, start = self.clip(index, camera)
        with locating(path, index, camera), self._videos.reader(path) as reader:
            reader.check_range(start, self._length(index), self.fps)
            check_frame_shape((reader.height, reader.width, 3), self.features[camera].shape, _DECLARED)

    def _read_images(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        encoded, shape = self._image_block(index, camera), self.features[camera].shape
        frames = np.empty((len(ts), *shape), np.uint8)
        with locating(self.rows(index).path, index, camera):
            for k, t in enumerate(ts.tolist()):
                try:
                    Image.open(io.BytesIO(encoded[t])).verify()  # the checksums of a PNG, which decoding passes over
                    image = np.asarray(Image.open(io.BytesIO(encoded[t])).convert("RGB"))
                except (UnidentifiedImageError, OSError, SyntaxError, ValueError, TypeError) as error:
                    raise BadDataError(f"not a readable image ({error})", frame=t) from None
                check_frame_shape(image.shape, shape, _DECLARED)
                frames[k] = image
        return frames

    def _read_image_block(self, index: int, camera: str) -> list[bytes]:
        """The encoded images of one episode and camera."""
        rows = self.rows(index)
        with locating(rows.path, index, camera):
            column = self._read_rows(rows, [camera], self._read_row_groups)[camera].combine_chunks()
            if not pa.types.is_struct(column.type) or "bytes" not in [field.name for field in column.type]:
                raise BadDataError(f"image column is {column.type}, expected struct<bytes, path>")
        return column.field("bytes").to_pylist()


def _fill(template: Any, fields: Mapping[str, str | int]) -> str:
    """The text of a template with its fields filled in.

    A field is a name in braces; for a number the width that LeRobot writes may follow, such as {file_index:03d}. All
    else that Python's format language can do is refused: a template of somebody else could fill the memory or look into
    our objects.
    """
    if not isinstance(template, str):
        raise ValueError("not a text")
    filled = ""
    for literal, name, spec, conversion in string.Formatter().parse(template):
        filled += literal
        if name is None:
            continue
        pattern = _NUMBER_FORMAT if isinstance(fields.get(name), int) else _TEXT_FORMAT
        if name not in fields or conversion or not pattern.fullmatch(spec or ""):
            raise ValueError(f"found {{{name}{f'!{conversion}' if conversion else ''}{spec and f':{spec}'}}}"[:100])
        filled += format(fields[name], spec or "")
    return filled


# Columns that LeRobot adds to every dataset and that say where a row belongs.
_BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "task_index")
_TEXT = ("string", "language")
_NUMBER_FORMAT = re.compile("(0[1-9])?d?")
_TEXT_FORMAT = re.compile("")
_DECLARED = "meta/info.json says"


def open_lerobot(root: Path) -> LeRobotSource:
    """Opens a LeRobot dataset of any supported version from its directory."""
    from acrlpd.data.sources.lerobot_versions import LeRobotV2Source, LeRobotV3Source

    info = read_info(root)
    version = info["codebase_version"]
    if version in ("v2.0", "v2.1"):
        return LeRobotV2Source(root, info)
    if version == "v3.0":
        return LeRobotV3Source(root, info)
    raise DatasetError(
        f"{root}/meta/info.json: LeRobot {version} cannot be read, only v2.0, v2.1 and v3.0; "
        "convert the dataset with lerobot's own tools"
    )


def read_info(root: Path) -> dict[str, Any]:
    path = root / "meta" / "info.json"
    try:
        info = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: not valid JSON, truncated or damaged ({error})") from None
    if not isinstance(info, dict):
        raise DatasetError(f"{path}: expected an object with keys, found {type(info).__name__}")
    missing = [k for k in ("codebase_version", "fps", "features", "data_path") if k not in info]
    if missing:
        raise DatasetError(f"{path}: the key {missing[0]!r} is missing; is this a LeRobot dataset?")
    if not isinstance(fps := info["fps"], int | float) or not 0 < fps < math.inf:
        raise DatasetError(f"{path}: fps is {fps!r}, expected a number above 0")
    if not isinstance(size := info.get("chunks_size", 1000), int) or size <= 0:
        raise DatasetError(f"{path}: chunks_size is {size!r}, expected a whole number above 0")
    if not isinstance(info["features"], dict):
        raise DatasetError(f"{path}: features is {type(info['features']).__name__}, expected name: dtype and shape")
    for name, spec in info["features"].items():
        _check_feature(path, name, spec)
    return info


def _check_feature(path: Path, name: str, spec: Any) -> None:
    spec = spec if isinstance(spec, dict) else {}
    dtype, shape = spec.get("dtype"), spec.get("shape")
    if dtype in _TEXT:
        return
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
        raise DatasetError(
            f"{path}: the feature {name!r} has dtype {dtype!r} and shape {shape!r}, expected a name and whole numbers"
        )
    if dtype in ("video", "image") and len(shape) != 3:
        raise DatasetError(f"{path}: the camera {name!r} has shape {shape}, expected height, width and channels")


def _feature(spec: dict[str, Any]) -> Feature:
    shape = tuple(int(n) for n in spec["shape"])
    if spec["dtype"] in ("video", "image"):
        names = spec.get("names")
        named_first = isinstance(names, list) and names[:1] in (["channel"], ["channels"])
        if named_first or (shape[0] == 3 and shape[-1] != 3):
            shape = (*shape[1:], shape[0])
    elif shape == (1,):
        shape = ()
    return Feature(spec["dtype"], shape)


@dataclasses.dataclass(frozen=True)
class ParquetLayout:
    """The footer of a parquet file, kept so that random access parses it once."""

    footer: pq.FileMetaData
    starts: np.ndarray  # int64 [row groups + 1]: the first row of each row group, and the end
    columns: frozenset[str]


def _read_layout(path: Path) -> ParquetLayout:
    footer = pq.read_metadata(path)
    sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    columns = frozenset(footer.schema.to_arrow_schema().names)
    return ParquetLayout(footer, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), columns)


def _to_numpy(name: str, column: pa.ChunkedArray, feature: Feature | None) -> np.ndarray:
    """[n] or [n, ...] from a scalar or a (nested, fixed or variable size) list column without nulls."""
    values, rows = column.combine_chunks(), len(column)
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], column.type)
    while True:
        if values.null_count:
            raise BadDataError(f"column {name!r} has empty (null) values")
        if not hasattr(values, "flatten") or not hasattr(values, "values"):
            break
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(lengths) > 1:  # The sum may be right all the same, and numbers would move to other rows.
            raise BadDataError(f"column {name!r} has lists of {sorted(lengths)} numbers, expected equal lengths")
        values = values.flatten()
    array = values.to_numpy(zero_copy_only=False)
    shape = feature.shape if feature is not None else ()
    if array.size != rows * int(np.prod(shape)):
        raise BadDataError(
            f"column {name!r} has {array.size} numbers in {rows} rows, expected shape {list(shape)} per row"
        )
    return array.reshape(rows, *shape)
