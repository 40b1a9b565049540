"""Where the time of an update goes, read from a JAX trace: policy, critic, sampling, optimizer, data and the rest.

The trace says when each operation of the compiled program ran. The program's text says from which named scope of the
source an operation comes. The innermost scope counts.
"""

import collections
import gzip
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

PARTS = ("policy", "critic", "sampling", "optimizer", "data", "other")
SCOPES = ("policy", "critic", "sampling", "optimizer")
# The name in the trace of the host's wait for a batch.
DATA_WAIT = "data_wait"

_SCOPE = re.compile(rf"(?<![\w.])({'|'.join(SCOPES)})(?![\w.])")
_MODULE = re.compile(r"^HloModule ([\w.-]+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.-]+)")


class Segment(NamedTuple):
    """Something that ran on one thread or stream, in microseconds."""

    start: float
    end: float
    part: str


class Program(NamedTuple):
    """A compiled program: its name in a trace, and the part of every instruction."""

    name: str
    parts: Mapping[str, str]


def read_program(hlo_text: str) -> Program:
    """Finds the part of each instruction in the text of a compiled program.

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
            scopes[name] = _scope_of(line)
            members[computation].append(name)
            if called := _CALLED.search(line):
                callees[name] = called[1]
    usual = {name: _most_common(scopes[i] for i in inside) for name, inside in members.items()}
    parts = {
        name: scopes[name] or usual.get(callees.get(name, "")) or usual[computation] or "other"
        for computation, names in members.items()
        for name in names
    }
    module = _MODULE.search(hlo_text)
    return Program(module[1] if module else "", parts)


def _scope_of(line: str) -> str | None:
    """The innermost of our scopes in the name that JAX gave the operation on this line."""
    op_name = _OP_NAME.search(line)
    found = _SCOPE.findall(op_name[1]) if op_name else []
    return found[-1] if found else None


def _most_common(scopes: Iterable[str | None]) -> str | None:
    counts = collections.Counter(scope for scope in scopes if scope is not None)
    return counts.most_common(1)[0][0] if counts else None


def read_trace(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The events of the newest trace below a directory."""
    files = sorted(directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no *.trace.json.gz below {directory}: the profiler wrote no trace")
    with gzip.open(files[-1]) as file:
        return json.load(file)["traceEvents"]


def attribute_time(events: Iterable[Mapping[str, Any]], program: Program, wall_time_s: float) -> dict[str, float]:
    """Seconds per part; together they are the wall time.

    Operations that run at the same moment share that moment. A moment without an operation belongs to `data` if
    the host waits for a batch, and to `other` if not. Operations of other programs belong to `other`.
    """
    threads: dict[tuple[Any, Any], list[Segment]] = collections.defaultdict(list)
    waits = []
    for event in events:
        if event.get("ph") != "X":
            continue
        start, end = event["ts"], event["ts"] + event.get("dur", 0.0)
        args = event.get("args") or {}
        operation, module = args.get("hlo_op"), args.get("hlo_module", "").partition("(")[0]
        if operation is not None:
            part = program.parts.get(operation, "other") if module == program.name else "other"
            threads[event.get("pid"), event.get("tid")].append(Segment(start, end, part))
        elif event.get("name") == DATA_WAIT:
            waits.append(Segment(start, end, "data"))
    busy = [segment for thread in threads.values() for segment in innermost(thread)]
    seconds = {part: 1e-6 * time for part, time in shared_time(busy, waits).items()}
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


def shared_time(busy: Iterable[Segment], waits: Iterable[Segment]) -> dict[str, float]:
    """Microseconds per part: of the busy segments, and of the waits at moments when no segment is busy."""
    changes = [
        change
        for is_wait, segments in ((False, busy), (True, waits))
        for s in segments
        for change in ((s.start, 1, is_wait, s.part), (s.end, -1, is_wait, s.part))
    ]
    totals: dict[str, float] = collections.defaultdict(float)
    running: dict[str, int] = collections.defaultdict(int)
    num_busy = num_waiting = 0
    now = 0.0
    for time, change, is_wait, part in sorted(changes):
        if num_busy:
            for name, count in running.items():
                totals[name] += (time - now) * count / num_busy
        elif num_waiting:
            totals["data"] += time - now
        if is_wait:
            num_waiting += change
        else:
            num_busy += change
            running[part] += change
        now = time
    return dict(totals)
