"""Going back to an older checkpoint: the same bits as the run that was never stopped, and nothing is lost."""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from training_helpers import Processes, arrays_of, assert_equal_arrays, metrics_of, online_config, problems_in

from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.runs.directory import only_trainer, read_summary, run_directory, saved_steps
from acrlpd.runs.starting_point import find_starting_point
from acrlpd.training.experiment import run_experiment
from acrlpd.training.options import RunOptions

LAST = 24

Copy = Callable[[str], tuple[RLTrainConfig, pathlib.Path]]


def config_of(directory: pathlib.Path, name: str = "straight") -> RLTrainConfig:
    return online_config(
        directory,
        exp_name=name,
        offline_steps=12,
        online_steps=LAST - 12,
        online__update_to_data_ratio=0.2,
        eval_frequency=5,
        save_frequency=4,
        log_frequency=3,
        checkpoints__max_to_keep=100,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = config_of(tmp_path_factory.mktemp("runs"))
    assert run_experiment(config, RunOptions()) == 0
    return run_directory(config)


@pytest.fixture
def copy(straight: pathlib.Path, tmp_path: pathlib.Path) -> Copy:
    """Copies of the run, each a run of its own."""

    def make(name: str) -> tuple[RLTrainConfig, pathlib.Path]:
        config = config_of(tmp_path, name)
        shutil.copytree(straight, run_directory(config))
        return config, run_directory(config)

    return make


def replay_of(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "replay").iterdir()}


def assert_same_run(directory: pathlib.Path, straight: pathlib.Path) -> None:
    assert metrics_of(directory) == metrics_of(straight)
    assert_equal_arrays(arrays_of(directory / str(LAST)), arrays_of(straight / str(LAST)))
    assert replay_of(directory) == replay_of(straight)
    assert saved_steps(directory)[-1] == LAST and problems_in(directory) == []
    for result in ("evaluation", "best_evaluation", "online"):
        assert read_summary(directory)[result] == read_summary(straight)[result]


@pytest.mark.parametrize("step", [8, 20], ids=["offline", "online"])
def test_a_run_that_goes_back_ends_with_the_same_bits(straight: pathlib.Path, copy: Copy, step: int) -> None:
    config, directory = copy("back")
    newer = [other for other in saved_steps(directory) if other > step]
    metrics = (directory / "metrics.jsonl").read_bytes()
    assert run_experiment(config, RunOptions(resume=str(directory / str(step)))) == 0
    assert_same_run(directory, straight)
    aside = directory / "set_aside" / f"after-{step}"
    assert saved_steps(aside) == newer
    assert (aside / "metrics.jsonl").read_bytes() == metrics
    assert read_summary(aside) == read_summary(straight)
    assert {int(path.name) > step for path in (aside / "evaluations").iterdir()} == {True}
    assert replay_of(aside).items() <= replay_of(straight).items()
    assert_equal_arrays(arrays_of(aside / str(LAST)), arrays_of(straight / str(LAST)))
