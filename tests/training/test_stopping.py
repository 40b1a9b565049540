"""SIGINT and SIGTERM save and end the run with the usual exit codes; a second signal ends the run at once."""

import json
import pathlib
import signal
import time
from collections.abc import Sequence

import pytest
from training_helpers import Processes, arrays_of, assert_equal_arrays, finish, metrics_of, state_config

from acrlpd.runs.directory import run_directory, saved_steps


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> pathlib.Path:
    config = state_config(tmp_path_factory.mktemp("runs"), exp_name="straight")
    assert processes.run(config).returncode == 0
    return run_directory(config)


@pytest.mark.parametrize(
    ("number", "code", "updates_per_call", "steps"),
    [(signal.SIGINT, 130, 1, [13]), (signal.SIGTERM, 143, None, range(13, 20))],
)
def test_a_signal_saves_and_resume_continues_exactly(
    number: signal.Signals,
    code: int,
    updates_per_call: int | None,
    steps: Sequence[int],
    straight: pathlib.Path,
    processes: Processes,
    tmp_path: pathlib.Path,
) -> None:
    config = state_config(tmp_path, exp_name="interrupted", training__updates_per_call=updates_per_call)
    directory = run_directory(config)
    stopped = processes.run(config, order={"signal_before_step": 12, "signal": number})
    assert stopped.returncode == code, stopped.output
    assert "saving after the current step" in stopped.output
    # The run finishes the updates that it was preparing, then saves.
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == f"stopped by {number.name}"
    assert summary["final_step"] == saved_steps(directory)[-1] and summary["final_step"] in steps

    resumed = processes.run(config, resume=True)
    assert resumed.returncode == 0, resumed.output
    assert metrics_of(directory) == metrics_of(straight)
    assert_equal_arrays(arrays_of(directory / "20"), arrays_of(straight / "20"))
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
