"""Learning curves for the report: which metrics share a chart, and few enough points for a browser."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from acrlpd.runs.metrics_log import EVALUATION, ONLINE, TIMING
from acrlpd.runs.metrics_reader import Series
from acrlpd.runs.record import RunRecord

# Points of one curve; more are put together, with their range as a band. All runs share the budget.
_MAX_POINTS = 1000
_MIN_POINTS = 250
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Chart:
    """Metrics that are drawn together because they have the same unit."""

    title: str
    metrics: tuple[str, ...]
    note: str = ""


GROUPS: dict[str, tuple[Chart, ...]] = {
    "Evaluation": (
        Chart("Success rate", ("eval/success_rate",), "with its 95 % interval"),
        Chart("Return", ("eval/episode_reward_mean",), "undiscounted, the environment's own rewards"),
        Chart("Episode length", ("eval/episode_length_mean",), "steps"),
        Chart("Critic against realised return", ("eval/q_bias", "eval/q_rmse"), "bias above 0: too optimistic"),
        Chart("Value gain of best-of-N", ("eval/best_of_n_value_gain",), "chosen minus the candidates' mean"),
        Chart("Lost episodes", ("eval/lost_episodes",), "to crashes of the environment"),
    ),
    "Acting in the environment": (
        Chart("Success rate of collected episodes", ("online/success_rate",)),
        Chart("Return of collected episodes", ("online/episode_reward_mean",)),
        Chart("Length of collected episodes", ("online/episode_length_mean",), "steps"),
        Chart("Episodes collected", ("online/total_episodes",)),
        Chart("Environment steps", ("online/env_steps",)),
        Chart("Lost episodes of a round", ("online/lost_episodes",), "to crashes of the environment"),
    ),
    "Losses": (
        Chart("Total loss", ("total_loss",), "what is minimised: the weighted sum"),
        Chart("Critic loss", ("critic_loss",), "squared or Huber TD error"),
        Chart("BC loss", ("bc_loss",), "flow matching on logged actions"),
        Chart("Actor loss", ("actor_loss",)),
        Chart("Temperature loss", ("alpha_loss",)),
        Chart("Weight of behaviour cloning", ("bc_weight",)),
    ),
    "Critic": (
        Chart("Q and its target", ("q_mean", "target_q_mean"), "they should move together"),
        Chart("TD error", ("td_error_mean",), "mean distance of Q to its target"),
        Chart("Spread of Q", ("q_std", "q_ensemble_std"), "over the batch, and between the critics"),
        Chart("Critic gradient norm", ("critic_grad_norm",), "before clipping"),
        Chart("Critic parameter norm", ("critic_param_norm",)),
    ),
    "Best-of-N and policy": (
        Chart("Gain of best-of-N", ("best_of_n_gain",), "Q of the best candidate minus their mean"),
        Chart("Spread of the candidates' Q", ("candidate_q_std",)),
        Chart("Candidate diversity", ("candidate_diversity",), "0: all candidates are the same"),
        Chart("Advantage", ("advantage_mean", "advantage_std")),
        Chart("AWR weights", ("awr_weight_mean", "awr_weight_max")),
        Chart("Effective share of the batch", ("awr_effective_ratio",), "1: all weights are equal"),
        Chart("Temperature", ("alpha_value",)),
        Chart("Entropy estimate", ("entropy_estimate",)),
        Chart("Policy gradient norm", ("policy_grad_norm",), "before clipping"),
        Chart("Policy parameter norm", ("policy_param_norm",)),
        Chart("Learning rates", ("policy_lr", "critic_lr", "temperature_lr")),
    ),
    "Throughput": (
        Chart("Samples per second", ("timing/samples_per_s",)),
        Chart("Time of an update", ("timing/step_s", "timing/data_wait_s"), "seconds; waiting for data apart"),
        Chart("Utilisation of the devices (MFU)", ("timing/mfu",)),
        Chart(
            "Everything but updates",
            ("timing/checkpoint_s", "timing/evaluation_s", "timing/rollouts_s"),
            "seconds per line of metrics",
        ),
        Chart("Device memory", ("memory/device_gib", "memory/device_peak_gib"), "GiB, of the fullest device"),
        Chart("Host memory", ("memory/host_gib",), "GiB, of the training process"),
    ),
    "Data": (
        Chart("Windows that the critic may use", ("mask_ratio",), "share of the batch"),
        Chart("Steps inside their episode", ("valid_step_ratio",)),
        Chart("Windows that bootstrap", ("bootstrap_ratio",), "the rest ends in a terminal"),
        Chart("Rewards in the batch", ("reward_mean", "reward_min", "reward_max")),
    ),
}
OTHER = "Everything else"
# Where metrics go that are not named above.
_PREFIXES = {
    EVALUATION: "Evaluation",
    ONLINE: "Acting in the environment",
    TIMING: "Throughput",
    "memory/": "Throughput",
    "debug/": "Debug mode",
}
# Said by another curve, or on the time line.
_REDUNDANT = (
    "valid_samples",
    "update_skipped",
    "timing/steps_per_s",
    "eval/episodes",
    "eval/episode_reward_std",
    "online/episodes",
    "online/policy_step",
)
_ON_THE_TIMELINE = "anomaly/"
_INTERVALS = {"eval/success_rate": ("eval/success_rate_low", "eval/success_rate_high")}


def create_curves(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Groups of charts with their lines, as the page's script reads them.

    Steps are kept once per distinct set (`steps`), as most metrics share them. Metrics that never change are
    in `constants`, not in a chart.
    """
    collector = _Collector(max(_MIN_POINTS, _MAX_POINTS // len(records)))
    names = dict.fromkeys(name for record in records for name in record.series)
    constants: dict[str, float] = {}
    groups = []
    for title, charts in _group_charts(list(names)).items():
        drawn = []
        for chart in charts:
            metrics = [name for name in chart.metrics if name in names]
            varying = [name for name in metrics if not _is_constant(name, records)]
            constants |= {name: _constant(name, records) for name in metrics if name not in varying}
            if varying:
                drawn.append(_chart(chart, varying, records, collector))
        if drawn:
            groups.append({"title": title, "charts": drawn})
    return {"groups": groups, "constants": constants, "steps": collector.steps}


def _group_charts(names: Sequence[str]) -> dict[str, list[Chart]]:
    """The charts above, and one for every metric that they do not have."""
    groups = {title: list(charts) for title, charts in GROUPS.items()}
    taken = {*_REDUNDANT, *(name for pair in _INTERVALS.values() for name in pair)}
    taken |= {name for charts in GROUPS.values() for chart in charts for name in chart.metrics}
    for name in names:
        if name not in taken and not name.startswith(_ON_THE_TIMELINE):
            title = next((title for prefix, title in _PREFIXES.items() if name.startswith(prefix)), OTHER)
            groups.setdefault(title, []).append(Chart(name, (name,)))
    return groups


class _Collector:
    """Makes lines short, and keeps equal steps once."""

    def __init__(self, max_points: int) -> None:
        self.steps: list[list[int]] = []
        self._max_points = max_points
        self._known: dict[bytes, int] = {}

    def line(self, series: Series) -> dict[str, Any]:
        steps, mean, low, high = downsample(series, self._max_points)
        key = steps.tobytes()
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append(steps.tolist())
        line: dict[str, Any] = {"x": self._known[key], "y": round_numbers(mean)}
        if low is not None and high is not None:
            line |= {"low": round_numbers(low), "high": round_numbers(high)}
        return line


def _chart(chart: Chart, metrics: list[str], records: Sequence[RunRecord], collector: _Collector) -> dict[str, Any]:
    lines = []
    for run, record in enumerate(records):
        for position, name in enumerate(metrics):
            if name not in record.series:
                continue
            line = collector.line(record.series[name]) | {"run": run, "metric": position, "name": name}
            if name in _INTERVALS and all(end in record.series for end in _INTERVALS[name]):
                low, high = (collector.line(record.series[end]) for end in _INTERVALS[name])
                if low["x"] == high["x"] == line["x"]:
                    line |= {"low": low["y"], "high": high["y"]}
            lines.append(line)
    return {
        "title": chart.title,
        "note": chart.note,
        "metrics": metrics,
        "lines": lines,
        "points": metrics[0].startswith(EVALUATION),
    }


def downsample(series: Series, max_points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """At most `max_points` of a series: steps, means and, where points were put together, their range.

    A mean is over the finite values; where there is none, NaN.
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
    middles = np.append(edges[1:], len(steps)) - 1
    return (steps[edges] + steps[middles]) // 2, mean, low, high


def round_numbers(values: Iterable[float | None]) -> list[float | None]:
    """For JSON: few digits, and None where a number is missing or not finite."""
    return [float(f"{x:.{_DIGITS}g}") if x is not None and math.isfinite(x) else None for x in values]


def _is_constant(name: str, records: Sequence[RunRecord]) -> bool:
    if name in _INTERVALS:  # that it did not change is worth a picture
        return False
    values = np.concatenate([record.series[name].values for record in records if name in record.series])
    return bool(np.all(values == values[0]))


def _constant(name: str, records: Sequence[RunRecord]) -> float:
    return next(float(record.series[name].values[0]) for record in records if name in record.series)
