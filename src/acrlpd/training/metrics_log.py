"""metrics.jsonl: one JSON object per logged step, the same however often a run was interrupted."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# Wall-clock measurements; everything else in a line depends on the config alone.
TIMING = "timing/"
EVALUATION = "eval/"
# Counts up over the run: the last value is the one that means something.
_COUNTERS = ("skipped_updates",)


class MetricsLog:
    """Means over every `frequency` updates, appended to a file by the process that logs.

    Updates whose line is not complete yet are part of the run's state, so that a resumed run writes the
    line it would have written.
    """

    def __init__(self, path: pathlib.Path | None, frequency: int) -> None:
        """`path` None: this process keeps the numbers but does not write."""
        self.last: dict[str, Any] = {}
        self._path = path
        self._frequency = frequency
        self._window: list[dict[str, float]] = []

    def add(self, step: int, info: Mapping[str, np.ndarray]) -> bool:
        """The metrics of the update that made `step`; whether its line is due."""
        self._window.append({name: float(value) for name, value in info.items()})
        return step % self._frequency == 0

    def write_line(self, step: int, timing: Mapping[str, float | None]) -> dict[str, Any]:
        """Writes the means since the last line; returns the line."""
        line: dict[str, Any] = {"step": step} | _means(self._window)
        line |= {f"{TIMING}{name}": value for name, value in timing.items() if value is not None}
        self._window = []
        self.last = _finite(line)
        self._append(self.last)
        return self.last

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of its own, with names under eval/."""
        named = {f"{EVALUATION}{name}": float(value) for name, value in metrics.items()}
        self._append(_finite({"step": step} | named))

    @property
    def has_open_line(self) -> bool:
        return bool(self._window)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on; floats survive JSON exactly."""
        names = list(self._window[0]) if self._window else []
        return {"names": names, "window": [[info[name] for name in names] for info in self._window]}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Goes on after `step`; later lines of the interrupted run are dropped, they will be written again."""
        self._window = [dict(zip(state["names"], values, strict=True)) for values in state["window"]]
        lines = [line for line in read_metrics(self._path) if line["step"] <= step] if self._path else []
        self.last = next((line for line in reversed(lines) if not _is_evaluation(line)), {})
        if self._path is not None:
            temporary = self._path.with_name(self._path.name + ".tmp")
            temporary.write_text("".join(_dump(line) for line in lines))
            temporary.replace(self._path)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(_dump(line))


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut off is left out."""
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    """In float64, so that the order of magnitude of a metric does not matter."""
    if not window:
        return {}
    return {
        name: window[-1][name] if name in _COUNTERS else float(np.mean([info[name] for info in window]))
        for name in window[-1]
        if all(name in info for info in window)
    }


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.startswith(EVALUATION) for name in line)


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is not finite becomes None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


def _dump(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
