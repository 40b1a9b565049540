"""Statistics that normalise state and actions: their computation and file, as openpi's.

openpi's file has the numbers but does not say what they were made from, and statistics of absolute actions that are
applied to relative actions fail silently. So a second file next to it keeps the origin.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.files import write_text_atomically

ORIGIN_FILE = "norm_stats_origin.json"
STATISTICS_KEYS = ("state", "actions")
EPSILON = 1e-6  # Keeps the division finite if a dimension does not vary; part of openpi's normalisation.
_NUM_BINS = 5000
# Windows per vectorised step: about 90 MB of float64 for 50 actions of 14 dims.
_WINDOWS_PER_CHUNK = 16_384
_VALUES_PER_BLOCK = 65_536
# How statistics that do not fit are made anew.
FIX = "make statistics for this config with `acrlpd data stats`"


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
        """How many dims the data may have had. Released statistics are padded to the model's width.

        Padding has mean 0 and deviation 0 (or 1); a dim of the robot may look the same.
        """
        if self.dim != padded_dim:
            return range(self.dim, self.dim + 1)
        is_padding = (self.mean == 0) & np.isin(self.std, (0, 1))
        return range(max(np.flatnonzero(~is_padding), default=0) + 1, self.dim + 1)

    def is_identity(self, *, use_quantiles: bool) -> bool:
        """Whether normalising by these statistics changes nothing."""
        low, high = self.quantiles() if use_quantiles else (self.mean - self.std, self.mean + self.std)
        return np.allclose(low, -1, atol=2 * EPSILON) and np.allclose(high, 1, atol=2 * EPSILON)

    def quantiles(self) -> tuple[np.ndarray, np.ndarray]:
        if self.q01 is None or self.q99 is None:
            raise NormStatsError(
                "these norm statistics have no quantiles (q01, q99), which this policy normalises by; "
                "make them again with `acrlpd data stats`, or set data.use_quantile_norm=false"
            )
        return self.q01, self.q99


@dataclasses.dataclass(frozen=True)
class NormStatsOrigin:
    """What statistics were made from; a run whose transforms differ from these cannot use them."""

    dataset: str  # EpisodeSource.identity
    num_episodes: int
    num_frames: int
    action_horizon: int
    transforms: Mapping[str, Any]  # plain JSON: robot, units, columns, relative dims
    path: str | None = None  # of the dataset when the statistics were made; None: the file is older than this field

    def is_of_dataset(self, other: "NormStatsOrigin") -> bool:
        """Whether both were made from one dataset, which may have moved or grown in the meantime."""
        return self.dataset == other.dataset or (self.path is not None and self.path == other.path)

    def other_transforms(self, wanted: "NormStatsOrigin") -> list[str]:
        """The transforms in which the statistics differ from what is wanted, in words."""
        return [
            f"{name}: statistics {_show(self.transforms.get(name))}, this run {_show(value)}"
            for name, value in wanted.transforms.items()
            if self.transforms.get(name) != value
        ]


def _show(value: Any) -> str:
    return "absolute actions" if value is None else str(value)


class RunningStats:
    """openpi's statistics of batches [n, d]: moments, and quantiles from histograms of 5000 bins.

    The range of the values is known before. openpi's range grows from batch to batch, which moves the counts of
    thousands of frames by up to one of the old bins and loses the counts of the lowest bin, so that quantiles would
    depend on the order of the episodes.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        """`low` and `high` are the lowest and the highest values [d] of all batches."""
        self._count = 0
        self._mean = self._mean_of_squares = np.zeros(len(low))
        self._edges = [np.linspace(a - 1e-10, b + 1e-10, _NUM_BINS + 1) for a, b in zip(low, high, strict=True)]
        self._histograms = [np.zeros(_NUM_BINS) for _ in self._edges]

    def update(self, batch: np.ndarray) -> None:
        self._count += len(batch)
        weight = len(batch) / self._count
        mean, mean_of_squares = batch.mean(axis=0), np.square(batch).mean(axis=0)
        self._mean = self._mean + (mean - self._mean) * weight
        self._mean_of_squares = self._mean_of_squares + (mean_of_squares - self._mean_of_squares) * weight
        for dim, (edges, histogram) in enumerate(zip(self._edges, self._histograms, strict=True)):
            histogram += _count_into_bins(np.ascontiguousarray(batch[:, dim]), edges)

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


def identity_stats(dim: int) -> NormStats:
    """Statistics that change nothing, for values that are not normalised; openpi reads them like others."""
    ones = np.ones(dim)
    return NormStats(mean=0 * ones, std=ones - EPSILON, q01=-ones, q99=ones - EPSILON)


def compute_norm_stats(
    num_rows: int,
    read_windows: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    keys: Collection[str] = STATISTICS_KEYS,
) -> dict[str, NormStats]:
    """Statistics of state and action chunks; `read_windows` gives those that start at some of the `num_rows` rows.

    What `keys` leave out is not normalised: its statistics are those of the identity. The data is read twice, first for
    its range.
    """

    def batches() -> Iterator[tuple[str, np.ndarray]]:
        for start in range(0, num_rows, _WINDOWS_PER_CHUNK):
            data = read_windows(np.arange(start, min(start + _WINDOWS_PER_CHUNK, num_rows)))
            for key in keys:
                yield key, np.asarray(data[key], np.float64).reshape(-1, data[key].shape[-1])

    dims = {key: values.shape[-1] for key, values in read_windows(np.arange(1)).items()}
    bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for key, batch in batches():
        low, high = bounds.get(key, (np.inf, -np.inf))
        bounds[key] = np.minimum(low, batch.min(axis=0)), np.maximum(high, batch.max(axis=0))
    running = {key: RunningStats(*bounds[key]) for key in keys}
    for key, batch in batches():
        running[key].update(batch)
    return {key: running[key].get_statistics() if key in keys else identity_stats(dims[key]) for key in STATISTICS_KEYS}


def save_norm_stats(
    directory: Path, norm_stats: Mapping[str, NormStats], origin: NormStatsOrigin | None = None
) -> None:
    """Writes openpi's `norm_stats.json` into the directory, and the origin next to it."""
    directory.mkdir(parents=True, exist_ok=True)
    stats = {
        key: {name: None if x is None else np.asarray(x).tolist() for name, x in vars(stats).items()}
        for key, stats in norm_stats.items()
    }
    write_text_atomically(directory / NORM_STATS_FILE, json.dumps({"norm_stats": stats}, indent=2))
    if origin is None:
        (directory / ORIGIN_FILE).unlink(missing_ok=True)  # the origin of older statistics would be wrong
    else:
        write_text_atomically(directory / ORIGIN_FILE, json.dumps(dataclasses.asdict(origin), indent=2))


def require_replaceable(directory: Path, origin: NormStatsOrigin) -> None:
    """Refuses to replace statistics that another config may need.

    These are statistics of another dataset, statistics of this dataset with another horizon or other transforms, and
    released statistics.
    """
    path = directory / NORM_STATS_FILE
    if not path.is_file():
        return
    found = load_norm_stats_origin(directory)
    if found is None:
        whose = "that `acrlpd data stats` did not make, for example those of released weights"
    elif not found.is_of_dataset(origin):
        whose = f"of another dataset ({found.path or 'somewhere else'}, {found.num_frames} frames)"
    else:
        differences = found.other_transforms(origin)
        if found.action_horizon != origin.action_horizon:
            differences.append(f"action_horizon: statistics {found.action_horizon}, this run {origin.action_horizon}")
        if not differences:
            return
        whose = f"of this dataset that another config made ({'; '.join(differences)})"
    raise NormStatsError(
        f"{path} holds norm statistics {whose}. Give the new statistics a name of their own with --data.asset_id NAME, "
        "and the same to `acrlpd train`; or replace the old ones with --overwrite"
    )


def load_norm_stats(directory: str | Path) -> dict[str, NormStats]:
    """Reads `norm_stats.json` as openpi or `save_norm_stats` wrote it."""
    path = Path(directory) / NORM_STATS_FILE
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


def require_complete(norm_stats: Mapping[str, NormStats], action_dim: int, directory: Path) -> None:
    """Refuses statistics that leave the state or a part of the actions unscaled."""
    path = directory / NORM_STATS_FILE
    for key in STATISTICS_KEYS:
        if key not in norm_stats:
            raise NormStatsError(f"{path} has no statistics of {key!r}, only {sorted(norm_stats)}; {FIX}")
    if norm_stats["actions"].dim < action_dim:
        raise NormStatsError(
            f"{path}: the statistics of 'actions' have {norm_stats['actions'].dim} dims, the policy's actions have "
            f"{action_dim}; {FIX}"
        )


def _parse_stats(path: Path, key: str, fields: Mapping[str, Any]) -> NormStats:
    names = [name for name in ("mean", "std", "q01", "q99") if fields.get(name) is not None]
    arrays = {name: np.asarray(fields[name], np.float64) for name in names}
    stats = NormStats(**arrays)
    sizes = {name: x.shape for name, x in arrays.items()}
    if len(set(sizes.values())) != 1:
        raise NormStatsError(f"{path}: the statistics of {key!r} disagree about the number of dims: {sizes}")
    if stats.mean.ndim != 1:
        raise NormStatsError(
            f"{path}: the statistics of {key!r} must be a list of numbers, found shape {stats.mean.shape}"
        )
    for name, x in arrays.items():
        if not np.isfinite(x).all():  # later comparisons with NaN would accept it
            raise NormStatsError(
                f"{path}: {name} of {key!r} is not finite in dims {np.flatnonzero(~np.isfinite(x)).tolist()}; repair "
                "the data and make the statistics again with `acrlpd data stats`"
            )
    return stats


def load_norm_stats_origin(directory: str | Path) -> NormStatsOrigin | None:
    """What the statistics in the directory were made from; None if there is no such file (openpi writes none)."""
    path = Path(directory) / ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        return NormStatsOrigin(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise NormStatsError(f"{path} is damaged ({error}); make it again with `acrlpd data stats`") from error
