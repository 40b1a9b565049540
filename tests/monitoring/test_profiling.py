"""Profiles: which steps, the arithmetic on traces, and what happens when a trace cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acrlpd.cli.main import main
from acrlpd.config import ConfigError
from acrlpd.monitoring.profiling import (
    PARTS,
    Segment,
    StepProfiler,
    attribute_time,
    innermost,
    parse_profile_steps,
    read_program,
    shared_time,
)

PROGRAM = """
HloModule jit_train_step

%fused.1 (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %tanh.1 = f32[2]{0} tanh(%p), metadata={op_name="jit(train_step)/jvp(policy)/tanh"}
}

%body (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  %copy.1 = f32[2]{0} copy(%q)
  ROOT %dot.1 = f32[2]{0} add(%copy.1, %q), metadata={op_name="jit(train_step)/sampling/while/body/add"}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0), metadata={op_name="batch.observations.state"}
  %fusion.1 = f32[2]{0} fusion(%a), kind=kLoop, calls=%fused.1
  %while.1 = f32[2]{0} while(%fusion.1), condition=%cond, body=%body
  %add.2 = f32[2]{0} add(%while.1, %a), metadata={op_name="jit(train_step)/transpose(jvp(policy))/critic/add"}
  ROOT %mul.3 = f32[2]{0} multiply(%add.2, %a), metadata={op_name="jit(train_step)/optimizer/mul"}
}
"""


def test_operations_belong_to_their_innermost_scope() -> None:
    _, parts = read_program(PROGRAM)
    assert (parts["add.2"], parts["mul.3"], parts["dot.1"]) == ("critic", "optimizer", "sampling")
    assert parts["fusion.1"] == "policy"  # what it calls
    assert (parts["while.1"], parts["copy.1"]) == ("sampling", "sampling")  # its body, and what stands around


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(train_step)/policy_head/add", "other"),
        ("jit(f)/transpose(jvp(policy))/rematted_computation/sampling/dot", "sampling"),
        ("jit(f)/vmap(critic)/dot", "critic"),
    ],
)
def test_scopes_are_whole_words(name: str, scope: str) -> None:
    text = (
        f'ENTRY %main (a: f32[2]) -> f32[2] {{\n  ROOT %add.1 = f32[2] add(%a, %a), metadata={{op_name="{name}"}}\n}}'
    )
    assert read_program(text)[1] == {"add.1": scope}


segments = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20), st.sampled_from(["policy", "critic", "other"])), max_size=12
)


@given(segments, segments)
def test_moments_are_shared(busy: list[tuple[int, int, str]], waits: list[tuple[int, int, str]]) -> None:
    """Against counting, moment by moment."""
    expected: dict[str, float] = {}
    for moment in range(80):
        running = [part for start, length, part in busy if start <= moment < start + length]
        for part in running:
            expected[part] = expected.get(part, 0.0) + 1 / len(running)
        if not running and any(start <= moment < start + length for start, length, _ in waits):
            expected["data"] = expected.get("data", 0.0) + 1
    running = [Segment(start, start + length, part) for start, length, part in busy]
    found = shared_time([*running, *(Segment(start, start + length, "data") for start, length, _ in waits)])
    assert {part: time for part, time in found.items() if time > 1e-9} == pytest.approx(expected)


def test_nested_operations_are_counted_once() -> None:
    thread = [Segment(0, 10, "other"), Segment(2, 5, "policy"), Segment(3, 4, "critic"), Segment(12, 14, "policy")]
    assert list(innermost(thread)) == [
        Segment(0, 2, "other"),
        Segment(2, 3, "policy"),
        Segment(3, 4, "critic"),
        Segment(4, 5, "policy"),
        Segment(5, 10, "other"),
        Segment(12, 14, "policy"),
    ]


ARGS = {"hlo_op": "fusion.1", "hlo_module": "jit_train_step"}


def test_what_is_left_of_the_wall_time_is_other() -> None:
    events = [
        {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 3e5, "name": "fusion.1", "args": ARGS},
        {"ph": "X", "pid": 1, "tid": 1, "ts": 7e5, "dur": 1e5, "name": "fusion.1", "args": {**ARGS, "hlo_module": "x"}},
        {"ph": "X", "pid": 1, "tid": 2, "ts": 2e5, "dur": 4e5, "name": "data_wait"},
        {"ph": "M", "pid": 1, "name": "process_name"},
    ]
    found = attribute_time(events, read_program(PROGRAM), wall_time_s=1.0)
    assert found == pytest.approx({**dict.fromkeys(PARTS, 0.0), "policy": 0.3, "data": 0.3, "other": 0.4})


@pytest.mark.parametrize("text", ["5", "0:3", "5:5", "7:2", "a:b", "1:2:3", ""])
def test_profile_steps_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--profile_steps must be a:b"):
        parse_profile_steps(text)


def test_profile_steps() -> None:
    assert parse_profile_steps("10:20") == (10, 20)


@pytest.mark.parametrize(
    ("steps", "message"),
    [(range(1001, 1031), "gone on after step 1000, so nothing is traced"), (range(1, 9), "ended before step 10")],
)
def test_steps_that_a_run_does_not_make_are_remarked_once(
    steps: range, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler((10, 20), tmp_path)
    for step in steps:
        profiler.after_update(step, None, None)  # type: ignore[arg-type]
    profiler.close()
    assert [message in record.message for record in caplog.records] == [True]
    assert not list(tmp_path.iterdir())


PROFILE_INTO_A_FILE = """
import logging, pathlib, sys
import jax
from acrlpd.monitoring.profiling import StepProfiler
logging.basicConfig(format="%(message)s")
directory = pathlib.Path(sys.argv[1])
(directory / "profile").write_text("a file where the trace should go")
double = jax.jit(lambda x: 2 * x).lower(1.0).compile()
profiler = StepProfiler((1, 2), directory)
for step in (1, 2, 3):
    profiler.after_update(step, double(1.0), double)
profiler.close()
print("the run went on")
"""


def test_a_trace_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    """As a process: JAX's profiler is of no use after that."""
    command = [sys.executable, "-c", PROFILE_INTO_A_FILE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "the run went on\n", done.stderr
    assert done.stderr.count(f"no trace in {tmp_path / 'profile'}: ") == 1 and "Traceback" not in done.stderr


def test_the_command_refuses_them_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # the command sets it where it is not
    assert main(["train", "--config", "debug", "--profile_steps", "8"]) == 2
    assert "--profile_steps must be a:b" in capsys.readouterr().err
