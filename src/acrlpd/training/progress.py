"""What a person sees while a run trains: a bar on a terminal, a line per logged step elsewhere."""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import rich.console
import rich.progress

from acrlpd.runs.metrics_log import TIMING

logger = logging.getLogger(__name__)

# Times a second that the bar is drawn: enough for the eye, little for the interpreter.
_REFRESH_RATE = 2.0


class Progress:
    """Progress of one phase of a run. On processes that do not log, nothing."""

    def __init__(self, phase: str, first_step: int, last_step: int, *, enabled: bool) -> None:
        self._phase, self._last = phase, last_step
        self._enabled = enabled
        self._bar: rich.progress.Progress | None = None
        console = rich.console.Console(stderr=True)
        if enabled and console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[text]}"),
                console=console,
                refresh_per_second=_REFRESH_RATE,
            )
            self._task = self._bar.add_task(phase, total=last_step, completed=first_step, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, line: Mapping[str, Any]) -> None:
        """A new line of metrics."""
        text = describe(line)
        rate = line.get(f"{TIMING}steps_per_s")
        if rate:  # checkpoints and evaluations are in it
            text += f"  eta {_duration((self._last - line['step']) / rate)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], text=text)
        elif self._enabled:
            logger.info("%s %d/%d  %s", self._phase, line["step"], self._last, text)


def describe(line: Mapping[str, Any]) -> str:
    """The numbers that matter most, those that are there."""
    shown = (
        ("loss", line.get("total_loss"), "{:.4g}"),
        ("Q", line.get("q_mean"), "{:.4g}"),
        ("samples/s", line.get(f"{TIMING}samples_per_s"), "{:.1f}"),
        ("MFU", line.get(f"{TIMING}mfu"), "{:.1%}"),
    )
    return "  ".join(f"{name} {form.format(value)}" for name, value, form in shown if value is not None)


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
