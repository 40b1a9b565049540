"""A run that is killed, at any moment, and resumed computes what it would have computed."""

import pathlib
import random

import pytest
from training_helpers import (
    Processes,
    arrays_of,
    assert_equal_arrays,
    metrics_of,
    pi0_config,
    problems_in,
    state_config,
    train_here,
)

from acrlpd.config import RLTrainConfig
from acrlpd.runs.directory import is_finished, run_directory, saved_steps
from acrlpd.runs.record import read_run

STEPS = 28


def config_of(directory: pathlib.Path, name: str) -> RLTrainConfig:
    # Lines of metrics and checkpoints do not coincide, so a line is often half done when a save happens. The pool of
    # decoded episodes is refilled every 11 updates, so a save may lie anywhere in what is drawn from it.
    return pi0_config(
        directory,
        exp_name=name,
        offline_steps=STEPS,
        save_frequency=10,
        log_frequency=7,
        checkpoints__max_to_keep=2,
        data__episodes_per_memory_pool=2,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = config_of(tmp_path_factory.mktemp("runs"), "uninterrupted")
    train_here(config)
    return run_directory(config)


def test_killed_during_a_save_and_at_a_random_step(
    uninterrupted: pathlib.Path, processes: Processes, tmp_path: pathlib.Path
) -> None:
    config = config_of(tmp_path, "killed")
    directory = run_directory(config)
    killed = processes.run(config, order={"kill_in_save_of_step": 20})
    assert killed.returncode == -9 and list(directory.glob("20*tmp*/*/*")), killed.output
    assert saved_steps(directory) == [10]
    assert problems_in(directory) == []  # a checkpoint has all of its checksums, or is absent

    kill_before_step = random.randrange(12, STEPS)
    killed = processes.run(config, order={"kill_before_step": kill_before_step}, resume=True)
    assert killed.returncode == -9 and "after step 10" in killed.output, killed.output
    steps = saved_steps(directory)  # the last save may have been under way
    assert 10 <= steps[-1] <= kill_before_step

    resumed = processes.run(config, resume=True)
    assert resumed.returncode == 0 and f"after step {steps[-1]}" in resumed.output, resumed.output
    assert metrics_of(directory) == metrics_of(uninterrupted), f"killed before step {kill_before_step}"
    assert_equal_arrays(arrays_of(directory / str(STEPS)), arrays_of(uninterrupted / str(STEPS)))
    assert not list(directory.glob("*tmp*"))


def test_killed_before_the_first_save_starts_again(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, exp_name="killed", save_frequency=10, training__updates_per_call=1)
    assert processes.run(config, order={"kill_before_step": 8}).returncode == -9
    # Nothing of the metrics is lost but the line that was not complete. (Longer calls may lose those under way.)
    assert [line["step"] for line in metrics_of(run_directory(config))] == [5]
    train_here(config, resume=True)
    assert [line["step"] for line in metrics_of(run_directory(config))] == [5, 10, 15, 20]


def test_a_run_that_goes_on_is_not_over(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=5, log_frequency=5)
    directory = run_directory(config)
    train_here(config)
    assert is_finished(directory)
    longer = state_config(tmp_path, offline_steps=20, log_frequency=5)
    changes = {"resume": True, "allow_changed": ["training.offline_steps"]}
    assert processes.run(longer, order={"kill_before_step": 7}, **changes).returncode == -9
    assert not is_finished(directory)
    assert read_run(directory).status.startswith("under way or cut off")
