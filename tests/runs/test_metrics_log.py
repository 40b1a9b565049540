import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acrlpd.files import read_json_lines
from acrlpd.runs.metrics_log import EVALUATION, MetricsLog

values = st.floats(width=32, allow_nan=True, allow_infinity=True)


def feed(log: MetricsLog, numbers: list[float], first: int) -> None:
    for step, number in enumerate(numbers, start=first):
        if log.add(step, {"loss": np.float32(number), "skipped_updates": np.int32(step)}):
            log.write_line(step, "offline", {})


@given(st.lists(values, min_size=1, max_size=30), st.integers(1, 7), st.integers(0, 30))
def test_an_interrupted_log_is_the_log(tmp_path_factory, numbers: list[float], frequency: int, cut: int) -> None:
    """Whatever was written after the checkpoint is written again, and an open line is not forgotten."""
    directory = tmp_path_factory.mktemp("log")
    straight = MetricsLog(directory / "straight.jsonl", frequency)
    feed(straight, numbers, 1)
    cut = min(cut, len(numbers))
    interrupted = MetricsLog(directory / "interrupted.jsonl", frequency)
    feed(interrupted, numbers[:cut], 1)
    state = json.loads(json.dumps(interrupted.state_dict()))
    feed(interrupted, numbers[cut:], cut + 1)
    resumed = MetricsLog(directory / "interrupted.jsonl", frequency)
    resumed.load_state_dict(state, cut)
    feed(resumed, numbers[cut:], cut + 1)
    texts = [
        path.read_text() if path.exists() else ""
        for path in (directory / "straight.jsonl", directory / "interrupted.jsonl")
    ]
    assert texts[0] == texts[1]


def test_a_line_holds_means_and_last_counts(tmp_path: pathlib.Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 2)
    feed(log, [1.0, 2.0, 5.0, 6.0], 1)
    assert read_json_lines(tmp_path / "metrics.jsonl") == [
        {"step": 2, "phase": "offline", "loss": 1.5, "skipped_updates": 2.0},
        {"step": 4, "phase": "offline", "loss": 5.5, "skipped_updates": 4.0},
    ]


def test_a_line_holds_extremes_over_its_updates(tmp_path: pathlib.Path) -> None:
    """A reward that one batch of a hundred has is the largest reward there is."""
    log = MetricsLog(tmp_path / "metrics.jsonl", 3)
    for step, reward in enumerate((0.0, 1.0, -2.0), start=1):
        log.add(step, {"reward_min": reward, "reward_max": reward, "reward_mean": reward})
    line = log.write_line(3, "offline", {})
    assert (line["reward_min"], line["reward_max"]) == (-2.0, 1.0)
    assert line["reward_mean"] == pytest.approx(-1 / 3)


def test_a_mean_is_over_the_updates_that_report_it(tmp_path: pathlib.Path) -> None:
    """Also after a resume: updates of the critics alone have no loss of the policy."""
    log = MetricsLog(tmp_path / "metrics.jsonl", 4)
    for step, info in enumerate([{"q": 1.0}, {"q": 2.0}, {"q": 3.0, "bc": 5.0}], start=1):
        log.add(step, info)
    state = log.state_dict()
    log.add(4, {"q": 100.0})  # the state is written while the run goes on
    resumed = MetricsLog(tmp_path / "metrics.jsonl", 4)
    resumed.load_state_dict(json.loads(json.dumps(state)), 3)
    assert resumed.add(4, {"q": 6.0, "bc": 7.0})
    assert resumed.write_line(4, "offline", {}) == {"step": 4, "phase": "offline", "q": 3.0, "bc": 6.0}


def test_what_is_not_finite_is_null_in_the_file(tmp_path: pathlib.Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 1)
    feed(log, [math.nan], 1)
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    feed(MetricsLog(path, 1), [1.0, 2.0], 1)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]


def test_evaluations_are_lines_of_their_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 1)
    feed(log, [1.0], 1)
    log.write_event(1, EVALUATION, {"success_rate": 0.5})
    assert read_json_lines(path)[1] == {"step": 1, "eval/success_rate": 0.5}
    again = MetricsLog(path, 1)
    again.load_state_dict(log.state_dict(), 1)
    assert again.last == {"step": 1, "phase": "offline", "loss": 1.0, "skipped_updates": 1.0}


def test_a_process_that_does_not_log_writes_nothing() -> None:
    log = MetricsLog(None, 1)
    feed(log, [1.0], 1)
    assert log.last["loss"] == 1.0
