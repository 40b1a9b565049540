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
# Counts up over the run: the last value is the one that means something.
_COUNTERS = ("skipped_updates",)
# Extremes over the updates of a line, by the end of their names.
_EXTREMES = {"_min": np.min, "_max": np.max}


class MetricsLog:
    """Means over every `frequency` updates, appended to a file by the process that logs.

    Updates whose line is not complete yet are part of the run's state, so that a resumed run writes the
    line it would have written.
    """

    def __init__(self, path: pathlib.Path | None, frequency: int) -> None:
        """`path` None: this process keeps the numbers but does not write."""
        self.last: dict[str, Any] = {}
        self._file = JsonLinesFile(path)
        self._frequency = frequency
        self._window: list[dict[str, float]] = []

    def add(self, step: int, info: Mapping[str, np.ndarray]) -> bool:
        """The metrics of the update that made `step`; whether its line is due."""
        self._window.append({name: float(value) for name, value in info.items()})
        return step % self._frequency == 0

    def write_line(
        self,
        step: int,
        phase: str,
        timing: Mapping[str, float | None],
        annotate: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Writes the means since the last line, and what `annotate` has to say of them; returns the line."""
        line: dict[str, Any] = {"step": step, "phase": phase} | _means(self._window)
        line |= {f"{TIMING}{name}": value for name, value in timing.items() if value is not None}
        self._window = []
        self.last = _finite(line)
        if annotate is not None:
            self.last |= _finite(annotate(self.last))
        self._file.append(self.last)
        return self.last

    def write_event(self, step: int, kind: str, metrics: Mapping[str, float]) -> dict[str, Any]:
        """A line of its own for what does not happen at every step, with names under `kind` (EVALUATION, ONLINE)."""
        named = {f"{kind}{name}": float(value) for name, value in metrics.items()}
        line = _finite({"step": step} | named)
        self._file.append(line)
        return line

    @property
    def has_open_line(self) -> bool:
        return bool(self._window)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on; floats survive JSON exactly."""
        return {"window": list(self._window)}  # a copy: it is written while the run goes on

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Goes on after `step`; later lines of the interrupted run are dropped, they will be written again."""
        self._window = [dict(info) for info in state["window"]]
        lines = [line for line in self._file.read() if line["step"] <= step]
        self.last = next((line for line in reversed(lines) if not _is_event(line)), {})
        self._file.replace(lines)


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut off is left out."""
    return read_json_lines(path)


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    """Of what all updates report, in float64, so that the order of magnitude of a metric does not matter."""
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
    """JSON has no NaN: what is not finite becomes None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
