"""SIGINT and SIGTERM save and end the run with the usual exit codes; a second signal ends the run at once."""

import json
import logging
import os
import pathlib
import signal
import time
from collections.abc import Mapping

import pytest
from training_helpers import (
    Processes,
    arrays_of,
    assert_equal_arrays,
    finish,
    metrics_of,
    online_config,
    state_config,
    train_here,
)

from acrlpd.agents import Agent
from acrlpd.runs.directory import run_directory, saved_steps
from acrlpd.training.options import RunOptions
from acrlpd.training.train_runs import train_runs


def test_a_signal_saves_and_resume_continues_exactly(processes: Processes, tmp_path: pathlib.Path) -> None:
    straight = state_config(tmp_path, exp_name="straight")
    train_here(straight)

    directory = run_directory(state_config(tmp_path, exp_name="interrupted"))
    # The run finishes the updates that it was preparing, then saves; a line of metrics ends a call.
    for number, code, step, updates_per_call, ends in (
        (signal.SIGINT, 130, 7, 1, [8]),
        (signal.SIGTERM, 143, 12, None, range(13, 16)),
    ):
        config = state_config(tmp_path, exp_name="interrupted", training__updates_per_call=updates_per_call)
        order = {"signal_before_step": step, "signal": number}
        stopped = processes.run(config, order=order, resume=directory.exists())
        assert stopped.returncode == code, stopped.output
        assert "saving after the current step" in stopped.output
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["status"] == f"stopped by {number.name}"
        assert summary["final_step"] == saved_steps(directory)[-1] and summary["final_step"] in ends

    train_here(config, resume=True)
    assert metrics_of(directory) == metrics_of(run_directory(straight))
    assert_equal_arrays(arrays_of(directory / "20"), arrays_of(run_directory(straight) / "20"))
    assert json.loads((directory / "summary.json").read_text())["status"] == "finished"


def test_a_second_signal_ends_at_once(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=100_000, save_frequency=10)
    # The step takes an hour: if the second signal did not end the process, the run would go on and save step 12.
    process = processes.start(config, order={"sleep_s": 3600.0, "sleep_from_step": 11, "report_steps": True})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 11"):
            break
    while not saved_steps(run_directory(config)):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "saving after the current step" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 143
    assert saved_steps(run_directory(config)) == [10]


def test_a_run_that_was_stopped_before_its_first_update_names_no_checkpoint(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = online_config(tmp_path, offline_steps=0)

    def stop(agent: Agent, step: int) -> Mapping[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"success_rate": 0.0}

    with caplog.at_level(logging.INFO, "acrlpd"):
        assert train_runs([config], [run_directory(config)], RunOptions(), eval_fn=stop) == 143
    assert saved_steps(run_directory(config)) == []
    assert "stopped by SIGTERM at step 0; best step 0 by success (0 %); no checkpoint" in caplog.text
