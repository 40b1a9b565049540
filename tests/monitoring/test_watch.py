"""The live view: follows a growing file, copes with every state of a run, ends cleanly."""

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_factory import make_run, metrics_line

from acrlpd.cli.main import main
from acrlpd.console import Console
from acrlpd.monitoring.watch import sparkline, status, time_left, watch
from acrlpd.runs.metrics_log import Series
from acrlpd.runs.record import RunReader


def line(step: int, **metrics: float | None) -> bytes:
    return json.dumps({"step": step, **metrics}).encode() + b"\n"


def show(run: Path, width: int = 100) -> str:
    out = io.StringIO()
    assert watch(run, once=True, interval_s=1.0, console=Console(file=out, width=width)) == 0
    return out.getvalue()


@given(st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(math.nan)), min_size=1, max_size=200), st.integers(1, 60))
def test_sparklines(values: list[float], width: int) -> None:
    drawn = sparkline(Series(np.arange(len(values)), np.array(values)), width)
    assert len(drawn) == min(len(values), width)
    assert set(drawn) <= set(" ▁▂▃▄▅▆▇█")
    if len(values) <= width:
        assert [mark == " " for mark in drawn] == [math.isnan(value) for value in values]
        finite = [(value, mark) for value, mark in zip(values, drawn, strict=True) if not math.isnan(value)]
        assert [mark for _, mark in sorted(finite)] == sorted(mark for _, mark in finite)


# -- what is shown -------------------------------------------------------------------------------------------


def test_a_finished_run(tmp_path: Path) -> None:
    text = show(make_run(tmp_path / "done"))
    for words in (
        "quickstart/done",
        "online  step 2,500 of 2,500",
        "samples/s",
        "device 2.9 GiB, at most 3.17 GiB",
        "85 % success (95 %: 74 to 93 %) at step 2,500",
        "since step 2,250",
        "310 samples/s after 480",
        "finished",
        "█",
    ):
        assert words in text, words
    assert "time left" not in text


def test_a_running_one_has_time_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "running", finished=False, offline_steps=1000, online_steps=0)
    steady = b"".join(line(step, **{"timing/steps_per_s": 5.0}) for step in range(10, 501, 10))
    (run / "metrics.jsonl").write_bytes(steady)
    progress = RunReader(run).read()
    assert (status(progress), progress.last_step, progress.total_steps) == ("running", 500, 1000)
    assert time_left(progress) == "100 s"
    assert re.search(r"time left +100 s", show(run))
    os.utime(run / "metrics.jsonl", (time.time() - 7200,) * 2)
    assert "silent for 2 h 00 min" in show(run)


def test_a_run_that_went_on_after_its_summary_is_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "resumed")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line(2600, total_loss=1.0))
    assert status(RunReader(run).read()) == "running"


def test_a_summary_of_another_version_is_no_obstacle(tmp_path: Path) -> None:
    run = make_run(tmp_path / "strange")
    (run / "summary.json").write_text('{"status": "finished", "final_step": null}')
    assert status(RunReader(run).read()) == "finished"


def test_waiting_for_the_first_line(tmp_path: Path) -> None:
    assert "waiting for the first metrics" in show(tmp_path)
    run = make_run(tmp_path / "started", finished=False)
    (run / "metrics.jsonl").write_bytes(b'{"step": 10, "tot')
    assert "waiting for the first metrics" in show(run)
    (run / "baselines" / "bc" / "metrics.jsonl").touch()
    assert "comes first" not in show(run)  # it has a summary: the run itself is next
    (run / "baselines" / "bc" / "summary.json").unlink()
    assert "baseline bc comes first" in show(run)


def test_what_is_not_finite_is_seen(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line(1, total_loss=1.0) + line(2, total_loss=None))
    assert "not finite" in show(tmp_path)
    # Also if it never was: that is when it matters most.
    (tmp_path / "metrics.jsonl").write_bytes(line(1, total_loss=None, bc_loss=0.0))
    assert "not finite" in show(tmp_path) and "BC loss" not in show(tmp_path)


def test_large_numbers_are_no_powers_of_ten(tmp_path: Path) -> None:
    timing = {"timing/samples_per_s": 25_600.4, "timing/data_wait_s": 1.5, "memory/host_gib": 1010 / 1024}
    (tmp_path / "metrics.jsonl").write_bytes(line(1, **timing))
    text = show(tmp_path)
    assert "25,600 samples/s, 1.5 s per update waiting" in text and "host 1,010 MiB" in text and "e+" not in text


def test_names_with_brackets_are_no_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lr[bold]")
    summary = json.loads((run / "summary.json").read_text()) | {"status": "stopped: [/data] is full"}
    (run / "summary.json").write_text(json.dumps(summary))
    text = show(run)
    assert "lr[bold]" in text and "[/data] is full" in text


def test_escape_sequences_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    """In a real terminal: a name, a status and an anomaly that would clear the screen and set the title."""
    nasty = "\x1b[2J\x1b]0;title\x07\x9b5n"
    run = make_run(tmp_path / f"name {nasty}")
    summary = json.loads((run / "summary.json").read_text()) | {"status": f"stopped: {nasty}"}
    (run / "summary.json").write_text(json.dumps(summary))
    anomaly = {"kind": f"kind {nasty}", "step": 3, "last_step": None, "severity": "error"}
    anomaly |= {"message": f"message {nasty}", "advice": f"advice {nasty}"}
    (run / "anomalies.jsonl").write_text(json.dumps(anomaly) + "\n")
    terminal, inside = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    command = [sys.executable, "-m", "acrlpd.cli.main", "watch", str(run), "--once"]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment, close_fds=True)
    os.close(inside)
    seen = read_until(terminal, None)
    assert process.wait() == 0
    os.close(terminal)
    assert not re.search("\x1b(?!\\[[0-9;]*m)|\x07|\x9b", seen)  # colours alone
    plain = re.sub("\x1b\\[[0-9;]*m", "", seen)
    assert r"name \x1b[2J\x1b]0;title" in plain and r"stopped: \x1b[2J\x1b]0;title" in plain
    assert plain.count(r"\x1b[2J") == 5 and all(word in plain for word in ("kind", "message", "advice"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["watch", "/nowhere/at/all"], "no such directory"),
        (["watch", __file__], "is a file"),
        (["watch", ".", "--interval", "0"], "--interval must be above 0"),
        (["watch", ".", "--interval", "inf"], "--interval must be above 0"),
    ],
)
def test_wrong_input_gets_one_message_and_exit_code_2(args: list[str], message: str, capsys) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_directory_of_runs_is_no_run(tmp_path: Path, capsys) -> None:
    """Nobody waits forever for the first metrics of something that is not a run."""
    run = make_run(tmp_path / "quickstart" / "first")
    for directory in (run.parent, tmp_path):
        assert main(["watch", str(directory), "--once"]) == 2
        assert f"there are runs below it: {run}" in capsys.readouterr().err


# -- as a process --------------------------------------------------------------------------------------------


def test_a_process_without_a_terminal_shows_the_run_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "done")
    command = [sys.executable, "-m", "acrlpd.cli.main", "watch", str(run)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "step 2,500 of 2,500" in result.stdout and result.stderr == ""


def test_following_in_a_terminal_until_control_c(tmp_path: Path) -> None:
    """New lines appear while it runs; Ctrl-C leaves the last frame, exit code 0 and a whole terminal."""
    run = make_run(tmp_path / "live", finished=False)
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b"")
    rng = np.random.default_rng(0)
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "acrlpd.cli.main", "watch", str(run), "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment, close_fds=True)
    os.close(inside)
    try:
        seen = read_until(terminal, "waiting for the first metrics")
        with metrics.open("a") as file:
            file.write(json.dumps(metrics_line(1234, 1500, 2500, rng)) + "\n")
        seen += read_until(terminal, "step 1,234 of 2,500")
        process.send_signal(signal.SIGINT)
        seen += read_until(terminal, None)
        assert process.wait() == 0
    finally:
        process.kill()
        os.close(terminal)
    assert "Traceback" not in seen
    assert seen.rindex("\x1b[?1049l") < seen.rindex("step 1,234 of 2,500")  # the frame is on the normal screen
    assert "\x1b[?25h" in seen  # and the cursor is back


def read_until(terminal: int, words: str | None) -> str:
    """What a terminal shows until some words appear; without words, until the process ends."""
    text = ""
    while words is None or words not in text:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the process has ended
            assert words is None, f"{words!r} did not appear; the terminal shows {text[-2000:]!r}"
            break
        text += data.decode(errors="replace")
    return text
