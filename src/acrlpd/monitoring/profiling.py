"""`--profile_steps a:b`: a JAX trace of a few updates, and where their time went."""

import json
import logging
import pathlib
import time
from typing import Any

import jax

from acrlpd.config import ConfigError
from acrlpd.files import write_text_atomically
from acrlpd.monitoring.step_time import attribute_time, read_program, read_trace
from acrlpd.monitoring.units import format_seconds
from acrlpd.runs.record import PROFILE_FILE

logger = logging.getLogger(__name__)

PROFILE_DIRECTORY = "profile"


def parse_profile_steps(text: str | None) -> tuple[int, int] | None:
    """'10:20' -> (10, 20): the ten updates after step 10. None asks for no profile."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) < int(last)):
        raise ConfigError(
            f"--profile_steps must be a:b with 1 <= a < b, the updates after step a up to step b (the first "
            f"compiles); found {text!r}"
        )
    return int(first), int(last)


class StepProfiler:
    """Traces the updates after step a up to step b.

    At both ends the profiler waits for all updates that are under way, so that the trace holds whole updates.
    """

    def __init__(self, steps: tuple[int, int], directory: pathlib.Path) -> None:
        self._first, self._last = steps
        self._trace = directory / PROFILE_DIRECTORY
        self._is_waiting = True  # step a has not been made yet
        self._started: float | None = None

    def after_update(self, step: int, result: Any, train_step: jax.stages.Compiled) -> None:
        """`train_step` is the compiled update that made `step`, and `result` its result."""
        if self._is_waiting and step >= self._first:
            self._is_waiting = False
            if step > self._first:
                logger.warning(
                    "--profile_steps %d:%d: the run has gone on after step %d, so nothing is traced; give later steps",
                    self._first,
                    self._last,
                    step - 1,
                )
                return
            jax.block_until_ready(result)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # a trace holds a million events: Python's calls would fill it
            jax.profiler.start_trace(str(self._trace), profiler_options=options)
            self._started = time.perf_counter()
        elif self._started is not None and step == self._last:
            jax.block_until_ready(result)
            self._finish(train_step)

    def _finish(self, train_step: jax.stages.Compiled) -> None:
        """Ends the trace, and writes to profile.json how many seconds of an update each part takes."""
        assert self._started is not None
        wall_time = time.perf_counter() - self._started
        if not self._stop():
            return
        try:
            parts = attribute_time(read_trace(self._trace), read_program(train_step.as_text() or ""), wall_time)
            per_step = {part: seconds / (self._last - self._first) for part, seconds in parts.items()}
            content = {"steps": [self._first, self._last], "parts": per_step, "trace": PROFILE_DIRECTORY}
            write_text_atomically(self._trace.with_name(PROFILE_FILE), json.dumps(content, indent=1) + "\n")
        except (OSError, EOFError, ValueError) as error:  # a profile that fails must not cost the run
            logger.warning("the trace in %s cannot be summarised: %s", self._trace, error)
            return
        total = sum(per_step.values()) or 1.0
        shown = (f"{part} {format_seconds(seconds)} ({seconds / total:.0%})" for part, seconds in per_step.items())
        logger.info("profile of updates %d to %d: %s", self._first + 1, self._last, ", ".join(shown))

    def _stop(self) -> bool:
        """Ends the trace; returns whether it was written. A full disk costs the profile, not the run."""
        self._started = None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            logger.warning("--profile_steps: no trace in %s: %s", self._trace, error)
            return False
        return True

    def close(self) -> None:
        """A run that ends within the profiled updates leaves a trace without a summary."""
        if self._is_waiting:
            logger.warning("--profile_steps: the run ended before step %d; nothing was traced", self._first)
        if self._started is not None and self._stop():
            logger.warning("--profile_steps: the run ended before step %d; the trace is not summarised", self._last)
