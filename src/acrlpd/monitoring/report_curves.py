"""Learning curves for the report: which metrics share a chart, and few enough points for a browser."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from acrlpd.evaluation.statistics import RATES
from acrlpd.monitoring.report_seeds import SeedGroup, average_metric
from acrlpd.runs.metrics_log import EVALUATION, VALIDATION, Series
from acrlpd.runs.record import RunRecord

# Points of one curve. Where there are more, neighbours become their mean, with their range as a band. All runs of a
# report share the points.
_MAX_POINTS = 1000
_MIN_POINTS = 250
_DIGITS = 5

# Every distinct list of steps -> its place in the page's data.
Steps = dict[tuple[int, ...], int]

_INTERVALS = {"eval/success_rate": ("eval/success_rate_low", "eval/success_rate_high")}
_SHARES = re.compile(r"success_rate|_ratio$|/robustness/")  # metrics from 0 to 1, shown in percent
_JUDGED = (EVALUATION, VALIDATION)  # metrics of evaluations, which are few
_MEANS_NOTE = "mean over seeds with its 95 % interval; thin: the seeds"


def create_curves(records: Sequence[RunRecord], seeds: Sequence[SeedGroup] = ()) -> dict[str, Any]:
    """Groups of charts with their lines, as the page's script reads them.

    Charts of evaluations have the means of `seeds`, too. Most metrics have the same steps, so `steps` holds every
    distinct list of steps once. A metric that never changes is in `constants` and has no chart.
    """
    steps: Steps = {}
    names = dict.fromkeys(name for record in records for name in record.series)
    constants: dict[str, float] = {}
    groups = []
    for title, charts in _group_charts(names).items():
        drawn = []
        for chart in charts:
            metrics = [name for name in chart["metrics"] if name in names]
            fixed = {name: value for name in metrics if (value := _constant(name, records)) is not None}
            constants |= fixed
            if len(fixed) < len(metrics):
                varying = [name for name in metrics if name not in fixed]
                drawn.append(_create_chart(chart, varying, records, seeds, steps))
        if drawn:
            groups.append({"title": title, "charts": drawn})
    return {"groups": groups, "constants": constants, "steps": list(steps)}


def _group_charts(names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The charts of charts.yaml, and one chart for every metric that the file does not name."""
    table = yaml.safe_load((files("acrlpd.monitoring") / "templates" / "charts.yaml").read_text(encoding="utf-8"))
    groups, prefixes = table["groups"], table["prefixes"]
    taken = {name for charts in groups.values() for chart in charts for name in chart["metrics"]} | set(table["hidden"])
    for name in names:
        if name not in taken and not name.startswith(tuple(table["hidden_prefixes"])):
            title = next((prefixes[prefix] for prefix in prefixes if name.startswith(prefix)), "Everything else")
            groups.setdefault(title, []).append({"title": name, "metrics": [name]})
    return groups


def _constant(name: str, records: Sequence[RunRecord]) -> float | None:
    """The value of a metric that never changed in any run; None for a metric that is worth a chart."""
    values = np.concatenate([record.series[name].values for record in records if name in record.series])
    if name in _INTERVALS or not np.all(values == values[0]):  # a success rate that never changed is worth a chart
        return None
    return float(values[0])


def _create_line(series: Series, max_points: int, steps: Steps) -> dict[str, Any]:
    """A line of few points. `steps` gets the line's steps, unless an earlier line has the same."""
    places, mean, low, high = downsample(series, max_points)
    line = {"x": steps.setdefault(tuple(places.tolist()), len(steps)), "y": round_numbers(mean)}
    if low is not None and high is not None:
        line |= {"low": round_numbers(low), "high": round_numbers(high)}
    return line


def _create_chart(
    chart: dict[str, Any],
    metrics: list[str],
    records: Sequence[RunRecord],
    seeds: Sequence[SeedGroup],
    steps: Steps,
) -> dict[str, Any]:
    max_points = max(_MIN_POINTS, _MAX_POINTS // len(records))
    lines = []
    for run, record in enumerate(records):
        for position, name in enumerate(metrics):
            if name not in record.series:
                continue
            line = _create_line(record.series[name], max_points, steps) | {"run": run, "metric": position, "name": name}
            line["points"] = name.startswith(_JUDGED)
            if name in _INTERVALS and all(end in record.series for end in _INTERVALS[name]):
                low, high = (_create_line(record.series[end], max_points, steps) for end in _INTERVALS[name])
                if low["x"] == high["x"] == line["x"]:
                    line |= {"low": low["y"], "high": high["y"]}
            lines.append(line)
    is_evaluation = metrics[0].startswith(_JUDGED)
    means = _create_means(metrics, records, seeds, steps) if is_evaluation else []
    # The note of a rate is about the interval of each run, which the interval of the mean replaces.
    notes = [] if means and metrics[0] in _INTERVALS else [chart.get("note")]
    return {
        "title": chart["title"],
        "note": "; ".join(filter(None, [*notes, _MEANS_NOTE if means else None])),
        "metrics": metrics,
        "lines": lines,
        "means": means,
        "share": _SHARES.search(metrics[0]) is not None,
    }


def _create_means(
    metrics: Sequence[str], records: Sequence[RunRecord], seeds: Sequence[SeedGroup], steps: Steps
) -> list[dict[str, Any]]:
    """The line of every group of seeds, with the interval of the mean as a band, at the steps that all seeds have."""
    lines = []
    for group, (position, name) in itertools.product(seeds, enumerate(metrics)):
        limits = RATES if _SHARES.search(name) else (-math.inf, math.inf)
        means = average_metric([records[place] for place in group.places.values()], name, limits)
        if means:
            intervals = [one.interval for one in means.values() if one.interval is not None]
            line = {
                "x": steps.setdefault(tuple(means), len(steps)),
                "y": round_numbers(one.mean for one in means.values()),
                "low": round_numbers(low for low, _ in intervals),
                "high": round_numbers(high for _, high in intervals),
            }
            lines.append(
                line | {"group": group.name, "runs": list(group.places.values()), "metric": position, "name": name}
            )
    return lines


def downsample(series: Series, max_points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """At most `max_points` of a series: steps, means and, where points were put together, their range.

    A mean is over the finite values; without a finite value the mean is NaN.
    """
    steps, values = series.steps, series.values
    if len(steps) <= max_points:
        return steps, values, None, None
    edges = np.linspace(0, len(steps), max_points + 1).astype(np.int64)[:-1]
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, edges, dtype=np.int64)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
    empty = counts == 0
    mean = np.where(empty, math.nan, sums / np.maximum(counts, 1))
    low = np.where(empty, math.nan, np.minimum.reduceat(np.where(finite, values, math.inf), edges))
    high = np.where(empty, math.nan, np.maximum.reduceat(np.where(finite, values, -math.inf), edges))
    ends = np.append(edges[1:], len(steps)) - 1
    return (steps[edges] + steps[ends]) // 2, mean, low, high


def round_numbers(values: Iterable[float | None]) -> list[float | None]:
    """For JSON: few digits, and None where a number is missing or not finite."""
    return [float(f"{x:.{_DIGITS}g}") if x is not None and math.isfinite(x) else None for x in values]
