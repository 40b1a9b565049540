"""A disk that is full or locked costs a checkpoint, not the run. A limit on file sizes stands in for a full disk."""

import json
import pathlib

from training_helpers import Processes, arrays_of, metrics_of, state_config, train_here

from acrlpd.runs.directory import run_directory, saved_steps

FULL = {"limit_files_before_step": 12, "file_limit_bytes": 8_192}


def test_training_goes_on_and_the_previous_checkpoint_stays(processes: Processes, tmp_path: pathlib.Path) -> None:
    """The disk is full when step 20 is saved, and the directory is read-only when step 30 is saved."""
    config = state_config(tmp_path, offline_steps=40, save_frequency=10)
    full = {**FULL, "unlimit_files_before_step": 22}
    locked = {"lock_directory_before_step": 25, "unlock_directory_before_step": 35}
    result = processes.run(config, order=full | locked)
    directory = run_directory(config)
    assert result.returncode == 0, result.output
    assert "the checkpoint of step 20 could not be written" in result.output
    assert "the checkpoint of step 30 could not be written (PermissionError" in result.output
    assert result.output.count("the checkpoint of step 10 stays; training goes on") == 2
    # One message for each, and nothing of what the libraries below have to say about it.
    assert result.output.count("could not be written") == 2
    assert "Traceback" not in result.output and "tensorstore_spec" not in result.output
    assert [line["step"] for line in metrics_of(directory)] == list(range(5, 41, 5))
    assert json.loads((directory / "summary.json").read_text())["failed_saves"] == 2
    assert saved_steps(directory) == [40]
    assert not list(directory.glob("*tmp*"))  # what a failed save leaves may be what fills the disk


def test_too_many_failures_in_a_row_end_the_run(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=40, save_frequency=10, checkpoints__max_failures=2)
    result = processes.run(config, order=FULL)
    assert result.returncode != 0
    assert "failure 2 in a row (checkpoints.max_failures=2): stopping" in result.output
    directory = run_directory(config)
    assert saved_steps(directory) == [10]
    assert arrays_of(directory / "10")[".step"] == 10
    train_here(config, resume=True)
    assert saved_steps(directory) == [40]


def test_a_run_whose_last_checkpoint_is_missing_has_not_succeeded(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=20, save_frequency=10)
    result = processes.run(config, order=FULL)
    assert result.returncode != 0
    assert "failure 3 in a row" in result.output  # it was tried again
    assert saved_steps(run_directory(config)) == [10]
