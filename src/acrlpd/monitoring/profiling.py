"""`--profile_steps a:b`: a JAX trace of a few updates, and where their time went.

The trace says when each operation of the compiled program ran. The program's text says from which named scope of the
source an operation comes: policy, critic, sampling or optimizer. The innermost scope counts.
"""

import collections
import gzip
import json
import logging
import math
import pathlib
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from acrlpd.config import ConfigError
from acrlpd.files import is_whole_number, write_text_atomically
from acrlpd.runs.record import PROFILE_FILE
from acrlpd.units import format_seconds

logger = logging.getLogger(__name__)

PROFILE_DIRECTORY = "profile"
PARTS = ("policy", "critic", "sampling", "optimizer", "data", "other")
# The name in the trace of the host's wait for a batch.
DATA_WAIT = "data_wait"

_SCOPE = re.compile(rf"(?<![\w.])({'|'.join(PARTS[:4])})(?![\w.])")
_MODULE = re.compile(r"^HloModule ([\w.-]+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.-]+)")


def parse_profile_steps(text: str | None) -> tuple[int, int] | None:
    """'10:20' -> (10, 20): the ten updates after step 10. None asks for no profile."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (is_whole_number(first) and is_whole_number(last) and 1 <= int(first) < int(last)):
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


class Segment(NamedTuple):
    """Something that ran on one thread or stream, in microseconds."""

    start: float
    end: float
    part: str


def read_program(hlo_text: str) -> tuple[str, dict[str, str]]:
    """The name of a compiled program in a trace, and the part of each of its instructions.

    An instruction that the compiler added has no scope of its own. It belongs to the part of the computation
    that it calls, or else to the most common part of the computation in which it stands.
    """
    scopes: dict[str, str | None] = {}
    callees: dict[str, str] = {}
    members: dict[str, list[str]] = collections.defaultdict(list)
    computation = ""
    for line in hlo_text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            name = instruction[1]
            op_name = _OP_NAME.search(line)
            found = _SCOPE.findall(op_name[1]) if op_name else []
            scopes[name] = found[-1] if found else None  # the innermost of our scopes in JAX's name of the operation
            members[computation].append(name)
            if called := _CALLED.search(line):
                callees[name] = called[1]
    usual = {}
    for computation, names in members.items():
        known = [scope for name in names if (scope := scopes[name]) is not None]
        usual[computation] = statistics.mode(known) if known else None
    parts = {
        name: scopes[name] or usual.get(callees.get(name, "")) or usual[computation] or "other"
        for computation, names in members.items()
        for name in names
    }
    module = _MODULE.search(hlo_text)
    return module[1] if module else "", parts


def read_trace(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The events of the newest trace below a directory."""
    files = sorted(directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no *.trace.json.gz below {directory}: the profiler wrote no trace")
    with gzip.open(files[-1]) as file:
        return json.load(file)["traceEvents"]


def attribute_time(
    events: Iterable[Mapping[str, Any]], program: tuple[str, dict[str, str]], wall_time_s: float
) -> dict[str, float]:
    """Seconds per part; together they are the wall time.

    Operations that run at the same moment share that moment. A moment without an operation belongs to `data` if
    the host waits for a batch, and to `other` if not. Operations of other programs belong to `other`.
    """
    threads: dict[tuple[Any, Any], list[Segment]] = collections.defaultdict(list)
    waits = []
    program_name, parts = program
    for event in events:
        if event.get("ph") != "X":
            continue
        start, end = event["ts"], event["ts"] + event.get("dur", 0.0)
        args = event.get("args") or {}
        operation, module = args.get("hlo_op"), args.get("hlo_module", "").partition("(")[0]
        if operation is not None:
            part = parts.get(operation, "other") if module == program_name else "other"
            threads[event.get("pid"), event.get("tid")].append(Segment(start, end, part))
        elif event.get("name") == DATA_WAIT:
            waits.append(Segment(start, end, "data"))
    busy = [segment for thread in threads.values() for segment in innermost(thread)]
    seconds = {part: 1e-6 * spent for part, spent in shared_time([*busy, *waits]).items()}
    seconds["other"] = seconds.get("other", 0.0) + max(wall_time_s - sum(seconds.values()), 0.0)
    return {part: seconds.get(part, 0.0) for part in PARTS}


def innermost(thread: list[Segment]) -> Iterator[Segment]:
    """Cuts nested segments of one thread so that each moment belongs to the innermost one."""
    stack: list[Segment] = []
    now = 0.0
    end_of_time = Segment(math.inf, math.inf, "other")
    for segment in [*sorted(thread, key=lambda s: (s.start, -s.end)), end_of_time]:
        while stack and stack[-1].end <= segment.start:
            ended = stack.pop()
            if ended.end > now:
                yield Segment(now, ended.end, ended.part)
                now = ended.end
        if stack and segment.start > now:
            yield Segment(now, segment.start, stack[-1].part)
        now = max(now, segment.start)
        stack.append(segment)


def shared_time(segments: Iterable[Segment]) -> dict[str, float]:
    """Microseconds per part. Segments of the same moment share it; waits for `data` count when nothing else runs."""
    changes = sorted(change for s in segments for change in ((s.start, 1, s.part), (s.end, -1, s.part)))
    totals: dict[str, float] = collections.defaultdict(float)
    running: collections.Counter[str] = collections.Counter()
    now = 0.0
    for moment, change, part in changes:
        num_busy = running.total() - running["data"]
        for name, count in running.items():
            if name != "data" and count:
                totals[name] += (moment - now) * count / num_busy
        if running["data"] and not num_busy:
            totals["data"] += moment - now
        running[part] += change
        now = moment
    return dict(totals)
