"""What a curve says: whether it falls, where it has settled, how often it spikes. Pure functions of its numbers."""

import dataclasses
from typing import Literal

import numpy as np

from acrlpd.runs.metrics_log import Phase, Series

# Fewer points say nothing about a curve.
MIN_POINTS = 16
# A point so many times above the median of its neighbours is a spike.
SPIKE = 5.0
_NEIGHBOURS = 11
# A curve is judged by at most so many means of successive points, so that chance cancels out.
_MOST_BLOCKS = 40
# Where a test for a trend (Mann and Kendall's) exceeds this number of standard deviations, chance is below 1 %.
_SIGNIFICANT = 2.58
# Changes below this share of the curve's level are not worth a word.
_LEAST_CHANGE = 0.02
# The standard deviation of a normal distribution is this many times the median distance of its values to their median.
_TO_SIGMA = 1.4826


@dataclasses.dataclass(frozen=True)
class Trend:
    """The second half of a curve, by a straight line through it that outliers do not move."""

    direction: Literal["falls", "is flat", "rises"]
    first: float
    last: float
    num_updates: int

    @property
    def change(self) -> float:
        """From the first to the last value as a share of the larger one; negative where the curve falls."""
        return (self.last - self.first) / max(abs(self.first), abs(self.last), 1e-30)

    def __str__(self) -> str:
        way = f"from {self.first:.3g} to {self.last:.3g}"
        if self.direction == "is flat":
            way = f"about {(self.first + self.last) / 2:.3g}"
        return f"{way} over the last {self.num_updates:,} updates"


def in_phase(series: Series | None, phase: Phase) -> Series | None:
    """The finite points of a metric within a phase; None if they are too few to say anything."""
    if series is None:
        return None
    kept = (series.steps >= phase.first_step) & (series.steps <= phase.last_step) & np.isfinite(series.values)
    return Series(series.steps[kept], series.values[kept]) if kept.sum() >= MIN_POINTS else None


def second_half(series: Series) -> Series:
    middle = len(series.steps) // 2
    return Series(series.steps[middle:], series.values[middle:])


def find_trend(series: Series) -> Trend:
    """Whether the second half of a curve falls or rises: beyond chance, beyond its noise, and by 2 % at least."""
    half = second_half(series)
    x, y = _block_means(half)
    i, j = np.triu_indices(len(x), k=1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))  # Theil and Sen's
    start = float(np.median(y - slope * x))
    first, last = (slope * float(half.steps[end]) + start for end in (0, -1))
    trend = Trend("is flat", first, last, int(half.steps[-1] - half.steps[0]))
    n, score = len(y), np.sign(y[j] - y[i]).sum()
    memory = _autocorrelation(y - slope * x - start)
    deviation = np.sqrt(n * (n - 1) * (2 * n + 5) / 18 * (1 + memory) / (1 - memory))
    is_clear = abs(score) - 1 > _SIGNIFICANT * deviation and abs(last - first) > spread(y - slope * x)
    if not is_clear or abs(trend.change) < _LEAST_CHANGE:
        return trend
    return dataclasses.replace(trend, direction="rises" if slope > 0 else "falls")


def _autocorrelation(residuals: np.ndarray) -> float:
    """How alike neighbours are, from 0 to 0.8: values that wander slowly have fewer independent parts than points.

    The limit is for curves without noise, whose distance to a straight line is smooth as well.
    """
    variance = float(np.mean(np.square(residuals)))
    if variance == 0:
        return 0.0
    return float(np.clip(np.mean(residuals[1:] * residuals[:-1]) / variance, 0.0, 0.8))


def settled_since(series: Series) -> int | None:
    """The step since which a curve stays within its noise of its final level; None if it has not settled."""
    if find_trend(series).direction != "is flat":
        return None
    x, y = _block_means(series)
    middle = len(y) // 2
    level = float(np.median(y[middle:]))
    reach = max(4 * spread(y[middle:]), _LEAST_CHANGE * abs(level))
    outside = np.flatnonzero(np.abs(y - level) > reach)
    first = int(outside[-1]) + 1 if len(outside) else 0
    return int(x[first]) if first <= 3 * len(y) // 4 else None


def num_spikes(series: Series) -> int:
    """How many points of the second half of a positive curve stand far above their neighbours."""
    values = second_half(series).values
    if values.min() < 0:
        return 0
    padded = np.pad(values, _NEIGHBOURS // 2, mode="reflect")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, _NEIGHBOURS), axis=1)
    return int((values > SPIKE * usual).sum())


def growth_of_swings(series: Series) -> float:
    """How much more a curve swings from point to point in its last quarter than in its second, against its level."""

    def swing(values: np.ndarray) -> float:
        level = abs(float(np.median(values)))
        return spread(np.diff(values)) / level if level > 0 else 0.0

    quarters = np.array_split(series.values, 4)
    before = swing(quarters[1])
    return swing(quarters[3]) / before if before > 0 else 1.0


def spread(values: np.ndarray) -> float:
    """The standard deviation of most of the values; outliers do not matter."""
    return _TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _block_means(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a curve as means of at most 40 blocks."""
    count = min(_MOST_BLOCKS, len(series.steps))
    blocks = np.array_split(np.arange(len(series.steps)), count)
    steps, values = ([float(np.mean(array[block])) for block in blocks] for array in (series.steps, series.values))
    return np.array(steps), np.array(values)
