"""The per-episode and whole-dataset statistics that a LeRobot v3.0 dataset carries in its metadata."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *_QUANTILES)

Stats = dict[str, list[Any]]


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
    return stats | {name: np.quantile(numbers, q, axis=0).tolist() for name, q in _QUANTILES.items()}


def image_stats(samples: Sequence[np.ndarray]) -> Stats:
    """Statistics per channel of samples [h, w, 3] in [0, 1]; each is shaped [[[r]], [[g]], [[b]]]."""
    pixels = np.concatenate([sample.reshape(-1, 3) for sample in samples]) / 255.0
    stats = column_stats(pixels)
    channels: Stats = {name: [[[value]] for value in stats[name]] for name in STATISTICS if name != "count"}
    return channels | {"count": [len(samples)]}


class DatasetStats:
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
