"""metrics.jsonl: one JSON object per logged step, the same however often a run was interrupted."""

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from acrlpd.runs.json_lines import JsonLinesFile, read_json_lines

# Wall-clock measurements; everything else in a line depends on the config alone.
TIMING = "timing/"
EVALUATION = "eval/"
ONLINE = "online/"
# Counters grow over the run: a line holds the last value.
_COUNTERS = ("skipped_updates",)
# Metrics whose line holds an extreme over its updates, by the end of their names.
_EXTREMES = {"_min": np.min, "_max": np.max}


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

    def add(self, step: int, info: Mapping[str, np.ndarray]) -> bool:
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
        self.last = next((line for line in reversed(lines) if not _is_event(line)), {})
        self._file.replace(lines)


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut off is left out."""
    return read_json_lines(path)


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    """The means, in float64, of the metrics that all updates of the window report."""
    if not window:
        return {}
    return {
        name: _summary(name, [info[name] for info in window])
        for name in window[-1]
        if all(name in info for info in window)
    }


def _summary(name: str, values: list[float]) -> float:
    if name in _COUNTERS:
        return values[-1]
    return float(_EXTREMES.get(name[-4:], np.mean)(values))


def _is_event(line: Mapping[str, Any]) -> bool:
    return any(name.startswith((EVALUATION, ONLINE)) for name in line)


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a number that is not finite becomes None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
