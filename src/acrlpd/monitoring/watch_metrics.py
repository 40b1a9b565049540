"""Following a metrics.jsonl that grows: only new bytes are read, and what is kept stays small."""

import math
import os
from pathlib import Path
from typing import Any

from acrlpd.runs.metrics_log import EVALUATION, ONLINE
from acrlpd.runs.record import parse_line

# Points kept of a curve; when there are more, neighbours become their mean.
_MAX_POINTS = 512


class Curve:
    """The course of a metric over the whole run, in few points."""

    def __init__(self) -> None:
        self.points: list[float] = []  # each the mean of `_stride` values; NaN where none was finite
        self.last: float | None = None
        self._stride = 1
        self._open: list[float] = []

    def add(self, value: float | None) -> None:
        self.last = value
        self._open.append(math.nan if value is None else value)
        if len(self._open) < self._stride:
            return
        self.points.append(_mean(self._open))
        self._open = []
        if len(self.points) >= _MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean(pair) for pair in pairs]
            self._stride *= 2


class MetricsTail:
    """The lines of a metrics.jsonl so far; `read` takes in what was added since.

    A resumed run writes a new file: then everything is read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.last_line: dict[str, Any] = {}  # of updates, not of an evaluation or of play
        self.last_evaluation: dict[str, Any] = {}
        self._offset = 0
        self._file_id: tuple[int, int] | None = None

    def read(self) -> bool:
        """Whether there was something new. Half a line waits for its end."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file_id or status.st_size < self._offset:
                    self.forget()
                    self._file_id = status.st_dev, status.st_ino
                file.seek(self._offset)
                return self._take_in(file.read())
        except FileNotFoundError:
            return False

    def _take_in(self, content: bytes) -> bool:
        end = content.rfind(b"\n") + 1
        self._offset += end
        for text in content[:end].splitlines():
            line = parse_line(text)
            if line is not None:
                self._add(line)
        return end > 0

    def _add(self, line: dict[str, Any]) -> None:
        if any(name.startswith(EVALUATION) for name in line):
            self.last_evaluation = line
        elif not any(name.startswith(ONLINE) for name in line):
            self.last_line = line
        for name, value in line.items():
            if name != "step" and (value is None or type(value) in (int, float)):
                self.curves.setdefault(name, Curve()).add(value)


def _mean(values: Any) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
