"""Reading a metrics.jsonl by metric: once for a report, or again and again while the file grows."""

import array
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np


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

    def __init__(self, path: Path) -> None:
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
