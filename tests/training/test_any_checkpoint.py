"""Any checkpoint of a run: going back to it, and branching from it, with the bits of the run that never stopped."""

import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from training_helpers import WAIT_S, Processes, arrays_of, assert_equal_arrays, metrics_of, online_config, problems_in

from acrlpd.cli.main import main
from acrlpd.config import ConfigError, RLTrainConfig, load_config
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.runs.directory import only_trainer, prepare_run_directories, read_summary, run_directory, saved_steps
from acrlpd.training.branching import begin_branch
from acrlpd.training.experiment import run_experiment
from acrlpd.training.options import RunOptions

LAST = 24
STEPS = [4, 8, 12, 16, 20, 24]

Copy = Callable[[str], tuple[RLTrainConfig, pathlib.Path]]

# Kills the process before an event of its file system.
KILL_BEFORE = """
import os, pathlib, shutil, signal, sys
def kill_before(count, *events):
    def watched(event, _):
        nonlocal count
        if event in events:
            count -= 1
            if count < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return watched
"""

# Goes back to a step again and again, each time in another copy of a run, and is killed before one more rename.
KILLED = f"""{KILL_BEFORE}
from acrlpd.training import going_back
run, step, root = pathlib.Path(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
for renames in range(100):
    copy = root / str(renames)
    shutil.copytree(run, copy)
    if (child := os.fork()) == 0:
        sys.addaudithook(kill_before(renames, "os.rename"))
        going_back.set_aside_newer(copy, step)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(renames)
"""

# Begins a branch again and again, each time in another directory, and is killed before one more rename or mkdir.
KILLED_BRANCH = f"""{KILL_BEFORE}
from acrlpd.config import apply_config_overrides, load_config
from acrlpd.runs.directory import run_directories, run_directory
from acrlpd.training.branching import begin_branch
checkpoint, root = map(pathlib.Path, sys.argv[1:])
config = apply_config_overrides(load_config(checkpoint.parent / "config.yaml"), checkpoint_dir=str(root))
for events in range(100):
    member = apply_config_overrides(config, exp_name=str(events))
    if (child := os.fork()) == 0:
        with run_directories([run_directory(member)], resume=False, overwrite=False):
            sys.addaudithook(kill_before(events, "os.rename", "os.mkdir"))
            begin_branch(checkpoint, member, run_directory(member))
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(events)
"""


def config_of(directory: pathlib.Path, name: str = "straight", **changes: Any) -> RLTrainConfig:
    settings = {
        "offline_steps": 12,
        "online_steps": LAST - 12,
        "online__update_to_data_ratio": 0.2,
        "eval_frequency": 8,
        "save_frequency": 4,
        "log_frequency": 3,
        "evaluation__num_episodes": 2,
        "checkpoints__max_to_keep": 100,
    }
    return online_config(directory, exp_name=name, **(settings | changes))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = config_of(tmp_path_factory.mktemp("runs"))
    assert run_experiment(config, RunOptions()) == 0
    assert saved_steps(run_directory(config)) == STEPS
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
    assert read_summary(directory)["evaluation"] == read_summary(straight)["evaluation"]


@pytest.mark.parametrize("step", [8, 20], ids=["offline", "online"])
def test_a_run_that_goes_back_ends_with_the_same_bits(straight: pathlib.Path, copy: Copy, step: int) -> None:
    config, directory = copy("back")
    metrics = (directory / "metrics.jsonl").read_bytes()
    given = str(directory / "8") if step == 8 else "20"  # a directory, or a step of the run that the config names
    assert run_experiment(config, RunOptions(resume=given)) == 0
    assert_same_run(directory, straight)
    assert read_summary(directory)["best_evaluation"] == read_summary(straight)["best_evaluation"]
    aside = directory / "set_aside" / f"after-{step}"
    assert saved_steps(aside) == [other for other in STEPS if other > step]
    assert (aside / "metrics.jsonl").read_bytes() == metrics
    assert read_summary(aside) == read_summary(straight)
    assert {int(path.name) > step for path in (aside / "evaluations").iterdir()} == {True}
    assert replay_of(aside) == replay_of(straight)  # also what the checkpoints have learned from before the step
    assert_equal_arrays(arrays_of(aside / str(LAST)), arrays_of(straight / str(LAST)))


def test_a_kill_while_checkpoints_are_set_aside(straight: pathlib.Path, processes: Processes, copy: Copy) -> None:
    """At every moment the newest checkpoint that is left has all that it needs, and a plain resume goes on from it."""
    config, directory = copy("killed")
    root = directory.parent / "kills"
    arguments = [sys.executable, "-c", KILLED, str(straight), "16", str(root)]
    output = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env=processes.environment(1), timeout=WAIT_S
    ).stdout
    kills = int(output)
    left = [root / str(number) for number in range(kills)]
    assert [saved_steps(run)[-1] for run in left] == [24, 20, *[16] * (kills - 2)]
    assert kills > 4 and all(problems_in(run) == [] for run in left)
    assert all({*saved_steps(run), *_set_aside(run)} == set(STEPS) for run in left)
    shutil.rmtree(directory)
    left[-2].rename(directory)  # some episodes are set aside, and some are not
    assert run_experiment(config, RunOptions(resume=True)) == 0
    assert_same_run(directory, straight)


def test_a_kill_while_a_branch_begins(straight: pathlib.Path, processes: Processes, tmp_path: pathlib.Path) -> None:
    """At every moment the branch has begun, or the same command begins it; no resume begins a run without its start."""
    arguments = [sys.executable, "-c", KILLED_BRANCH, str(straight / "16"), str(tmp_path)]
    output = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env=processes.environment(1), timeout=WAIT_S
    ).stdout
    begun = []
    for number in range(int(output)):
        config = config_of(tmp_path, str(number))
        directory = run_directory(config)
        begun.append(saved_steps(directory) == [16])
        if not begun[-1]:
            with pytest.raises(ConfigError, match=r"there is no run in|give --branch_from again"):
                prepare_run_directories([directory], resume=True, overwrite=False)
            prepare_run_directories([directory], resume=False, overwrite=False)
            begin_branch(straight / "16", config, directory)
        assert saved_steps(directory) == [16] and problems_in(directory) == []
        assert (directory / "metrics.jsonl").is_file() and load_config(directory / "config.yaml") == config
    assert len(begun) > 5 and begun == sorted(begun)


def _set_aside(run: pathlib.Path) -> list[int]:
    return [step for folder in (run / "set_aside").glob("*") for step in saved_steps(folder)]


def test_a_branch_without_changes_is_the_same_run(straight: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = config_of(tmp_path, "branch")
    directory = run_directory(config)
    assert run_experiment(config, RunOptions(branch_from=str(straight / "20"))) == 0
    assert_same_run(directory, straight)
    assert saved_steps(directory) == [20, 24]
    first = json.loads((directory / "20" / "run" / "run.json").read_text())
    assert first["branched_from"] == str(straight / "20") and first["config"]["exp_name"] == "branch"
    # Nothing was copied that never changes, and the other run is as it was.
    shared = next((straight / "replay").glob("episode-*.npz"))
    assert (directory / "replay" / shared.name).stat().st_ino == shared.stat().st_ino
    assert saved_steps(straight) == STEPS and problems_in(straight) == []


def test_a_branch_with_another_seed_and_another_config(
    straight: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, "branch", seed=7, online__final_bc_weight=0.5, online__bc_weight_decay_steps=0)
    with caplog.at_level("INFO", "acrlpd"):
        assert run_experiment(config, RunOptions(branch_from=str(straight / "20"))) == 0
    assert "seed: 42 -> 7" in caplog.text and "online.final_bc_weight: None -> 0.5" in caplog.text
    lines, others = metrics_of(run_directory(config)), metrics_of(straight)
    assert [line for line in lines if line["step"] <= 20] == [line for line in others if line["step"] <= 20]
    last, other = (next(line for line in reversed(found) if "phase" in line) for found in (lines, others))
    assert (last["bc_weight"], other["bc_weight"]) == (0.5, 1.0) and last["bc_loss"] != other["bc_loss"]
    assert run_experiment(config, RunOptions(resume=True)) == 0  # a run like every other, with a config of its own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic__hidden_dims": (16, 16)}, r"does not fit this config:\n  critics/online/\S+: .*shape"),
        ({"online_steps": 0}, "is in its online phase, and training.online_steps is 0"),
        ({}, "choose another --exp_name"),
    ],
    ids=["shapes", "phase", "itself"],
)
def test_a_branch_that_cannot_begin_leaves_nothing(
    straight: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    directory, name = (tmp_path, "branch") if changes else (straight.parents[1], "straight")
    config = config_of(directory, name, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        run_experiment(config, RunOptions(branch_from=str(straight)))
    assert not list(tmp_path.iterdir()) and saved_steps(straight) == STEPS


def test_a_branch_from_a_run_that_trains_removes_nothing(copy: Copy) -> None:
    (_, source), (config, directory) = copy("source"), copy("replaced")
    with only_trainer(source), pytest.raises(ConfigError, match="another process is training here"):
        run_experiment(config, RunOptions(branch_from=str(source), overwrite=True))
    assert saved_steps(directory) == STEPS and problems_in(directory) == []


def test_what_cannot_be_resumed_is_named(
    copy: Copy, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command: the message is all that a user sees, and no file has moved."""
    _, directory = copy("refused")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)

    def refused(*args: object) -> str:
        assert main(["train", *map(str, args)]) == 2
        return capsys.readouterr().err

    steps = ", ".join(map(str, STEPS))
    assert f"has no checkpoint of step 9; the steps of its checkpoints: {steps}" in refused("--resume", directory / "9")
    assert "does not exist" in refused("--resume", tmp_path / "nowhere")
    assert "contradicts the config, whose run is" in refused("--resume", directory / "8", "--exp_name", "other")
    assert "is one run, and --seeds" in refused("--resume", directory, "--seeds", 1, 2)
    assert "seed: 42 -> 1" in refused("--resume", directory / "8", "--seed", 1)
    # The seeds also name the preset, which has other values than the run.
    preset = directory.parent.name
    for stage in ((), ("--environment", "development")):  # of the preset, as the run was started
        message = refused("--config", preset, *stage, "--resume", directory / "8", "--seed", 1)
        assert "seed: 42 -> 1" in message and message.count(" -> ") == 1
    assert "contradicts the config" in refused("--config", "quickstart", "--resume", directory / "8")
    assert not list(here.iterdir())  # the demonstrations of the quick start were not collected
    assert "contradict" in refused("--resume", directory / "8", "--branch_from", directory)
    assert "the parts are policy, critics" in refused("--config", "debug", "--load", "critic", directory)
    (openpi := tmp_path / "openpi" / "params").mkdir(parents=True)
    (openpi / "_METADATA").touch()
    message = refused("--branch_from", openpi.parent)
    assert "is a checkpoint of openpi, without the state" in message and f"--load policy {openpi.parent}" in message
    with only_trainer(directory):
        assert "another process is training here" in refused("--resume", directory / "8")
        assert "another process is training here" in refused("--branch_from", directory / "8", "--exp_name", "new")
    assert saved_steps(directory) == STEPS and not (directory / "set_aside").exists()
    assert not (directory.parent / "new").exists()
    directory.rename(tmp_path / "moved")
    assert "lies in <checkpoints>/debug/<exp_name>: move it to such a place" in refused("--resume", tmp_path / "moved")
