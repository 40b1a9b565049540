"""Statistics that normalise state and actions: openpi's `norm_stats.json`, made from the columns alone.

openpi's file says what the numbers are but not what they were made from, and statistics of absolute
actions applied to relative ones fail silently. So the origin is kept in a second file next to it.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acrlpd.data.sources.source import ColumnTable

_STATS_FILE = "norm_stats.json"
_ORIGIN_FILE = "norm_stats_origin.json"
_NUM_BINS = 5000
# Windows per vectorised step: about 90 MB of float64 for 50 actions of 14 dims.
_WINDOWS_PER_CHUNK = 16_384
_VALUES_PER_BLOCK = 65_536
_STATISTICS_KEYS = ("state", "actions")


class NormStatsError(ValueError):
    """Norm statistics are missing or do not belong to this data; the message says how to make them."""


@dataclasses.dataclass(frozen=True)
class NormStats:
    """Per-dimension statistics of one key; float64 [d]."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None = None
    q99: np.ndarray | None = None

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]

    def trained_dims(self, padded_dim: int) -> range:
        """How many dims the data may have had. Released statistics are padded to the model's width, as training allows.

        What was padded has mean 0 and deviation 0 (or 1); a dim that looks like this may also be the robot's.
        """
        if self.dim != padded_dim:
            return range(self.dim, self.dim + 1)
        is_padding = (self.mean == 0) & np.isin(self.std, (0, 1))
        return range(max(np.flatnonzero(~is_padding), default=0) + 1, self.dim + 1)

    def quantiles(self) -> tuple[np.ndarray, np.ndarray]:
        if self.q01 is None or self.q99 is None:
            raise NormStatsError(
                "these norm statistics have no quantiles (q01, q99), which this policy normalises by; "
                "make them again with `acrlpd data stats`, or set data.use_quantile_norm=false"
            )
        return self.q01, self.q99

    def scale(self, *, use_quantiles: bool) -> np.ndarray:
        """What differences are divided by: the deviation, or half the distance of the quantiles."""
        if not use_quantiles:
            return self.std
        q01, q99 = self.quantiles()
        return (q99 - q01) / 2


@dataclasses.dataclass(frozen=True)
class NormStatsOrigin:
    """What statistics were made from; whatever differs here makes them wrong for a run."""

    dataset: str  # EpisodeSource.identity
    num_episodes: int
    num_frames: int
    action_horizon: int
    transforms: Mapping[str, Any]  # plain JSON: robot, units, columns, relative dims


class RunningStats:
    """openpi's running statistics over batches [..., d]: moments, and quantiles from 5000-bin histograms.

    Results equal openpi's for the same batches in the same order; only the counting is vectorised.
    """

    def __init__(self, bounds: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """`bounds`: the lowest and highest [d] of all that will come, where known; then no count has to move."""
        self._count = 0
        self._bounds = bounds

    def update(self, batch: np.ndarray) -> None:
        batch = batch.reshape(-1, batch.shape[-1])
        low, high = batch.min(axis=0), batch.max(axis=0)
        mean, mean_of_squares = batch.mean(axis=0), np.square(batch).mean(axis=0)
        if self._count == 0:
            bounds: tuple[np.ndarray, np.ndarray] = (low, high) if self._bounds is None else self._bounds
            self._low, self._high = bounds
            self._mean, self._mean_of_squares = mean, mean_of_squares
            self._edges = [_edges(a, b, margin=1e-10) for a, b in zip(self._low, self._high, strict=True)]
            self._histograms = [np.zeros(_NUM_BINS) for _ in low]
        elif batch.shape[-1] != len(self._low):
            raise ValueError(f"expected batches of {len(self._low)} dims, found {batch.shape[-1]}")
        elif np.any(low < self._low) or np.any(high > self._high):
            self._grow(np.minimum(low, self._low), np.maximum(high, self._high))
        self._count += len(batch)
        weight = len(batch) / self._count
        self._mean = self._mean + (mean - self._mean) * weight
        self._mean_of_squares = self._mean_of_squares + (mean_of_squares - self._mean_of_squares) * weight
        for dim, (edges, histogram) in enumerate(zip(self._edges, self._histograms, strict=True)):
            histogram += _count_into_bins(np.ascontiguousarray(batch[:, dim]), edges)

    def _grow(self, low: np.ndarray, high: np.ndarray) -> None:
        """Counts move to the bins of the wider range that hold their old left edges."""
        self._low, self._high = low, high
        for dim, (old_edges, histogram) in enumerate(zip(self._edges, self._histograms, strict=True)):
            self._edges[dim] = _edges(low[dim], high[dim])
            self._histograms[dim] = np.histogram(old_edges[:-1], self._edges[dim], weights=histogram)[0]

    def get_statistics(self) -> NormStats:
        if self._count < 2:
            raise NormStatsError(f"statistics need at least 2 vectors, found {self._count}")
        variance = self._mean_of_squares - np.square(self._mean)
        return NormStats(
            mean=self._mean,
            std=np.sqrt(np.maximum(variance, 0)),
            q01=self._quantile(0.01),
            q99=self._quantile(0.99),
        )

    def _quantile(self, q: float) -> np.ndarray:
        """Left edge of the bin in which the share q of all values is reached."""
        bins = [np.searchsorted(np.cumsum(histogram), q * self._count) for histogram in self._histograms]
        return np.array([edges[i] for edges, i in zip(self._edges, bins, strict=True)])


def _edges(low: np.floating, high: np.floating, margin: float = 0.0) -> np.ndarray:
    return np.linspace(np.float64(low) - margin, np.float64(high) + margin, _NUM_BINS + 1)


def _count_into_bins(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """`np.histogram(values, edges)[0]` for equally spaced edges that enclose all values, without its sort."""
    width = edges[-1] - edges[0]
    counts = np.zeros(_NUM_BINS, np.int64)
    if width <= 0:  # a constant so large that the margin around it vanishes
        counts[-1] = len(values)
        return counts
    for start in range(0, len(values), _VALUES_PER_BLOCK):  # blocks that stay in the processor's cache
        block = values[start : start + _VALUES_PER_BLOCK]
        bins = ((block - edges[0]) * (_NUM_BINS / width)).astype(np.intp)
        np.clip(bins, 0, _NUM_BINS - 1, out=bins)
        bins -= block < edges[bins]  # rounding may have put a value one bin off
        bins += (block >= edges[bins + 1]) & (bins < _NUM_BINS - 1)
        counts += np.bincount(bins, minlength=_NUM_BINS)
    return counts


def compute_norm_stats(
    table: ColumnTable,
    transform: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    columns: tuple[str, ...],
    action_columns: tuple[str, ...],
    action_horizon: int,
) -> dict[str, NormStats]:
    """Statistics of state and action chunks of every frame, after `transform` (repack and data transforms).

    As in openpi, a chunk that reaches past its episode repeats the last action. The data is gone through twice,
    for its range first: a histogram whose range grows moves the counts of thousands of frames by up to one of
    the old bins, and loses those of the lowest, so that quantiles would depend on the order of the episodes.
    """

    def batches() -> Iterator[tuple[str, np.ndarray]]:
        return _statistics_batches(table, transform, columns, action_columns, action_horizon)

    bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for key, batch in batches():
        low, high = bounds.get(key, (np.inf, -np.inf))
        bounds[key] = np.minimum(low, batch.min(axis=0)), np.maximum(high, batch.max(axis=0))
    running = {key: RunningStats(bounds.get(key)) for key in _STATISTICS_KEYS}
    for key, batch in batches():
        running[key].update(batch)
    return {key: stats.get_statistics() for key, stats in running.items()}


def _statistics_batches(
    table: ColumnTable,
    transform: Callable[[dict[str, Any]], dict[str, Any]],
    columns: tuple[str, ...],
    action_columns: tuple[str, ...],
    action_horizon: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """(key, float64 [n, d]) of all windows, some thousand at a time."""
    num_rows = int(table.offsets[-1])
    for start in range(0, num_rows, _WINDOWS_PER_CHUNK):
        rows = np.arange(start, min(start + _WINDOWS_PER_CHUNK, num_rows))
        steps = chunk_rows(table.offsets, rows, action_horizon)
        data = {name: table.columns[name][steps if name in action_columns else rows] for name in columns}
        data = transform(data)
        for key in _STATISTICS_KEYS:
            batch = np.asarray(data[key], np.float64)
            yield key, batch.reshape(-1, batch.shape[-1])


def chunk_rows(offsets: np.ndarray, rows: np.ndarray, action_horizon: int) -> np.ndarray:
    """Rows [n, T] of the action chunks that start at `rows`; past the end of an episode its last action repeats."""
    last = offsets[np.searchsorted(offsets, rows, side="right")] - 1
    return np.minimum(rows[:, None] + np.arange(action_horizon), last[:, None])


def save_norm_stats(
    directory: str | Path, norm_stats: Mapping[str, NormStats], origin: NormStatsOrigin | None = None
) -> None:
    """Writes openpi's `norm_stats.json` into the directory, and the origin next to it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stats = {
        key: {
            field.name: None if (value := getattr(stats, field.name)) is None else np.asarray(value).tolist()
            for field in dataclasses.fields(NormStats)
        }
        for key, stats in norm_stats.items()
    }
    _write_json(directory / _STATS_FILE, {"norm_stats": stats})
    if origin is None:
        (directory / _ORIGIN_FILE).unlink(missing_ok=True)  # an older one would tell a lie
    else:
        _write_json(directory / _ORIGIN_FILE, dataclasses.asdict(origin))


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2))
    temporary.replace(path)


def load_norm_stats(directory: str | Path) -> dict[str, NormStats]:
    """Reads `norm_stats.json` as openpi or `save_norm_stats` wrote it."""
    path = Path(directory) / _STATS_FILE
    if not path.is_file():
        raise NormStatsError(f"there are no norm statistics at {path}; make them with `acrlpd data stats`")
    try:
        stats = json.loads(path.read_text())["norm_stats"]
        return {key: _parse_stats(path, key, fields) for key, fields in stats.items()}
    except NormStatsError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NormStatsError(
            f"{path} is not a norm_stats.json ({type(error).__name__}: {error}); make it again with `acrlpd data stats`"
        ) from error


def _parse_stats(path: Path, key: str, fields: Mapping[str, Any]) -> NormStats:
    arrays = {
        name: None if fields.get(name) is None else np.asarray(fields[name], np.float64)
        for name in ("mean", "std", "q01", "q99")
    }
    mean, std = arrays["mean"], arrays["std"]
    if mean is None or std is None:
        raise KeyError(f"{key}: mean and std")
    sizes = {name: x.shape for name, x in arrays.items() if x is not None}
    if len(set(sizes.values())) != 1:
        raise NormStatsError(f"{path}: the statistics of {key!r} disagree about the number of dims: {sizes}")
    if mean.ndim != 1:
        raise NormStatsError(f"{path}: the statistics of {key!r} must be a list of numbers, found shape {mean.shape}")
    for name, x in arrays.items():
        if x is not None and not np.isfinite(x).all():  # every comparison with NaN would let it pass later
            raise NormStatsError(
                f"{path}: {name} of {key!r} is not finite in dims {np.flatnonzero(~np.isfinite(x)).tolist()}; repair "
                "the data and make the statistics again with `acrlpd data stats`"
            )
    return NormStats(mean, std, arrays["q01"], arrays["q99"])


def load_norm_stats_origin(directory: str | Path) -> NormStatsOrigin | None:
    """What the statistics in the directory were made from; None where nobody wrote it down (openpi)."""
    path = Path(directory) / _ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        return NormStatsOrigin(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise NormStatsError(f"{path} is damaged ({error}); make it again with `acrlpd data stats`") from error
