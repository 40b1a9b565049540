"""metrics.jsonl: one JSON object per logged step, the same however often a run was interrupted.

`MetricsLog` writes the file. `MetricsReader` reads it by metric: once for a report, or again and again while it grows.
"""

import array
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from acrlpd.files import JsonLinesFile
from acrlpd.units import format_percent

# Names of what follows from wall-clock measurements. All other metrics, except those of the memory, follow from the
# config alone, and are the same in every run of the config.
TIMING = "timing/"
EVALUATION = "eval/"
VALIDATION = "validation/"
ONLINE = "online/"
# The metrics of a validation that matter most, in words.
_VALIDATION_FACTS: dict[str, Callable[[float], str]] = {
    "flow_loss": lambda loss: f"flow loss {loss:.4g}",
    "relative_action_error": lambda share: f"action error {format_percent(share)} of the mean action's",
    "relative_best_of_n_error": lambda share: f"with best-of-N {format_percent(share)}",
    "q_rank_correlation": lambda value: f"rank correlation of Q and return {value:.2f}",
    "success_auc": lambda share: f"Q ranks success above failure in {format_percent(share)}",
}
# Counters grow over the run: a line holds the last value.
_COUNTERS = ("skipped_updates",)
# Metrics whose line holds an extreme over its updates, by the end of their names.
_EXTREMES = {"_min": np.min, "_max": np.max}


def describe_validation(latest: Callable[[str], float | None]) -> list[str]:
    """The known numbers of a validation, in words; `latest` gives a metric by its name without the prefix."""
    found = ((latest(name), form) for name, form in _VALIDATION_FACTS.items())
    return [form(value) for value, form in found if value is not None]


class MetricsLog:
    """Means over every `frequency` updates, appended to a file by the process that logs.

    The updates of a line that is not complete yet are part of the run's state, so that a resumed run writes
    the same line as a run that was never interrupted.
    """

    def __init__(self, path: pathlib.Path | None, frequency: int) -> None:
        """`path` is None on a process that keeps the numbers but does not write them."""
        self.last: dict[str, Any] = {}
        self._file = JsonLinesFile(path)
        self._frequency = frequency
        self._window: list[dict[str, float]] = []

    def add(self, step: int, info: Mapping[str, float]) -> bool:
        """Takes the metrics of the update that made `step`; returns whether the line of this step is due."""
        self._window.append({name: float(value) for name, value in info.items()})
        return step % self._frequency == 0

    def write_line(
        self,
        step: int,
        phase: str,
        timing: Mapping[str, float | None],
        annotate: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Writes the means since the last line, and the metrics that `annotate` adds to them; returns the line."""
        line: dict[str, Any] = {"step": step, "phase": phase} | _means(self._window)
        line |= {f"{TIMING}{name}": value for name, value in timing.items() if value is not None}
        self._window = []
        self.last = _finite(line)
        if annotate is not None:
            self.last |= _finite(annotate(self.last))
        self._file.append(self.last)
        return self.last

    def write_event(self, step: int, kind: str, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Writes a separate line for an evaluation or for collected episodes, with names under `kind`."""
        named = {f"{kind}{name}": float(value) for name, value in metrics.items()}
        line = _finite({"step": step} | named)
        self._file.append(line)
        return line

    def flush(self) -> None:
        """Tries again to write lines for which the disk had no space."""
        self._file.flush()

    @property
    def has_open_line(self) -> bool:
        return bool(self._window)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on; floats survive JSON exactly."""
        return {"window": list(self._window)}  # a copy: the state is saved while the run goes on

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Goes on after `step`. Later lines of the interrupted run are dropped: the run writes them again."""
        self._window = [dict(info) for info in state["window"]]
        lines = [line for line in self._file.read() if line["step"] <= step]
        self.last = next((line for line in reversed(lines) if "phase" in line), {})  # events have no phase
        self._file.replace(lines)


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric, in float64, over the updates that report it; extremes and counters as such.

    Updates of the critics alone report nothing of the policy.
    """
    means = {}
    for name in dict.fromkeys(name for info in window for name in info):
        values = [info[name] for info in window if name in info]
        means[name] = values[-1] if name in _COUNTERS else float(_EXTREMES.get(name[-4:], np.mean)(values))
    return means


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a number that is not finite becomes None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric over the run."""

    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # float64 [n]; NaN where the number was not finite


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive lines of one phase."""

    name: str
    first_step: int
    last_step: int


class MetricsReader:
    """The content of a metrics.jsonl; `read` takes in the complete lines that were added since the last call.

    A line that is not a JSON object with a step is counted and left out.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._start_over(None)

    def _start_over(self, file_id: tuple[int, int] | None) -> None:
        self.series: dict[str, Series] = {}
        self.phases: list[Phase] = []
        self.num_broken = 0
        self._columns: dict[str, tuple[array.array, array.array]] = {}
        self._offset = 0
        self._file_id = file_id

    def read(self) -> None:
        """Reads the new bytes only. A resumed run replaces the file; a new file is read from its start."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file_id or status.st_size < self._offset:
                self._start_over((status.st_dev, status.st_ino))
            start = self._offset
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):  # the line is still being written, or a kill cut it off
                    break
                self._offset += len(line)
                if line.strip():
                    self._add(line)
        if self._offset > start:
            self.series = {name: Series(np.array(x), np.array(y)) for name, (x, y) in self._columns.items()}

    def _add(self, line: bytes) -> None:
        parsed = parse_line(line)
        if parsed is None:
            self.num_broken += 1
            return
        step = parsed["step"]
        for name, value in parsed.items():
            if name != "step" and (value is None or type(value) in (int, float)):
                steps, values = self._columns.setdefault(name, (array.array("q"), array.array("d")))
                steps.append(step)
                values.append(math.nan if value is None or not math.isfinite(value) else value)
        if isinstance(phase := parsed.get("phase"), str):
            begins = not self.phases or self.phases[-1].name != phase
            first = step if begins else self.phases.pop().first_step
            self.phases.append(Phase(phase, first, step))


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl or anomalies.jsonl; None if the line is not a JSON object with a step."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and type(parsed.get("step")) is int else None
