"""Several runs in one program: each is what it would be alone, also after an interruption."""

import logging
import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from training_helpers import arrays_of, assert_equal_arrays, metrics_of, online_config, state_config

from acrlpd.agents import MetricsTable
from acrlpd.cli.main import main
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.data.pipeline.labels import Label, Labels
from acrlpd.data.pipeline.loader import DataLoader, create_data_loader
from acrlpd.files import LOCK
from acrlpd.monitoring.writers import Writers
from acrlpd.runs.directory import CONFIG_FILE, run_directory, saved_steps
from acrlpd.training import drive
from acrlpd.training.experiment import run_experiment
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.learner import Learner
from acrlpd.training.members import create_members
from acrlpd.training.options import RunOptions
from acrlpd.training.sharding import create_sharding
from acrlpd.training.train_runs import _runs_that_act_together

SEEDS = (3, 5, 8)
OFFLINE, ONLINE = 16, 14
# The programs for one run and for three runs add up products in another order.
TOLERANCE = {"rtol": 2e-3, "atol": 2e-4}


def seeds_config(directory: pathlib.Path, name: str) -> RLTrainConfig:
    return online_config(
        directory,
        exp_name=name,
        offline_steps=OFFLINE,
        online_steps=ONLINE,
        training__save_frequency=5,
        training__eval_frequency=10,
        log_frequency=4,
        checkpoints__max_to_keep=10,
    )


def directories_of(config: RLTrainConfig) -> list[pathlib.Path]:
    return [run_directory(config).with_name(f"{config.exp_name}-seed{seed}") for seed in SEEDS]


PLAYED: list[set[int]] = []


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """The directories of three runs that were trained together, offline and online; `PLAYED` tells who played."""
    play_jointly = drive.play_jointly

    def watched(players: Any, numbers: dict[int, int], num_runs: int) -> Any:
        PLAYED.append(set(numbers))
        return play_jointly(players, numbers, num_runs)

    config = seeds_config(tmp_path_factory.mktemp("together"), "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "play_jointly", watched)
        assert run_experiment(config, RunOptions(seeds=SEEDS)) == 0
    return directories_of(config)


def numbers(line: dict[str, object]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, float)}


def test_each_run_is_its_single_run(together: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
    config = apply_config_overrides(seeds_config(tmp_path, "alone"), seed=SEEDS[1])
    assert run_experiment(config, RunOptions()) == 0
    alone = run_directory(config)
    joint = together[1]
    assert saved_steps(joint) == saved_steps(alone)
    lines, expected = metrics_of(joint), metrics_of(alone)
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, wanted in zip(lines, expected, strict=True):
        assert line.keys() == wanted.keys()
        found = numbers(line)
        assert found == pytest.approx(numbers(wanted), rel=TOLERANCE["rtol"], abs=TOLERANCE["atol"]), line["step"]
    arrays, expected_arrays = (arrays_of(run / str(OFFLINE + ONLINE)) for run in (joint, alone))
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected_arrays[name], err_msg=name, **TOLERANCE)


def test_runs_differ_from_each_other(together: list[pathlib.Path]) -> None:
    losses = {metrics_of(directory)[0]["total_loss"] for directory in together}
    assert len(losses) == len(SEEDS)


def test_runs_play_their_rounds_together(together: list[pathlib.Path]) -> None:
    """They need their rounds at different updates. The last rounds may be played by some of them."""
    first_updates = {
        tuple(line["step"] for line in metrics_of(directory) if "online/env_steps" in line) for directory in together
    }
    assert len(first_updates) > 1
    assert len(PLAYED) >= 3 and all(played == {0, 1, 2} for played in PLAYED[:-2])


def test_an_interrupted_group_goes_on_to_the_same_end(
    together: list[pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill finds the runs at different checkpoints, one of them before its first."""
    config = seeds_config(tmp_path, "run")
    newest = {0: 25, 1: 10, 2: 0}
    for run, directory in enumerate(together):
        target = directories_of(config)[run]
        shutil.copytree(directory, target)
        for step in saved_steps(target):
            if step > newest[run]:
                shutil.rmtree(target / str(step))
        (target / "summary.json").unlink()
    actives = watch_updates(monkeypatch)
    assert run_experiment(config, RunOptions(seeds=SEEDS, resume=True)) == 0
    assert_same_ends(directories_of(config), together)
    # Runs at different steps share their calls, also after they were judged at different times.
    last_together = max(i for i, active in enumerate(actives) if active == {1, 2})
    assert last_together > max(i for i, active in enumerate(actives) if 1 in active) / 2


def watch_updates(monkeypatch: pytest.MonkeyPatch, then: Callable[[set[int]], None] | None = None) -> list[set[int]]:
    """Collects which runs are active in each call of the train step."""
    update, actives = Learner.update, []

    def watched(self: Learner, calls: Any, active: Any, num_updates: int, *, update_policy: bool) -> MetricsTable:
        actives.append(set(active))
        if then is not None:
            then(actives[-1])
        return update(self, calls, active, num_updates, update_policy=update_policy)

    monkeypatch.setattr(Learner, "update", watched)
    return actives


def assert_same_ends(found: list[pathlib.Path], expected: list[pathlib.Path]) -> None:
    """Metrics and the last checkpoints are equal to the last bit."""
    last = str(OFFLINE + ONLINE)
    for one, other in zip(found, expected, strict=True):
        assert metrics_of(one) == metrics_of(other)
        assert_equal_arrays(arrays_of(one / last), arrays_of(other / last))


@pytest.mark.slow
def test_a_signal_does_not_wait_for_episodes(
    together: list[pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run waits for its round when the signal comes. All runs save, and go on to the same end."""
    config = seeds_config(tmp_path, "run")
    play_jointly, played_after = drive.play_jointly, []

    def stop_while_a_run_waits(active: set[int]) -> None:
        if len(active) < len(SEEDS):
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(drive, "play_jointly", lambda *arguments: played_after.append(arguments))
            monkeypatch.setattr(Learner, "update", update)

    update = Learner.update
    watch_updates(monkeypatch, stop_while_a_run_waits)
    assert run_experiment(config, RunOptions(seeds=SEEDS)) == 128 + signal.SIGTERM
    assert not played_after
    monkeypatch.setattr(drive, "play_jointly", play_jointly)
    assert run_experiment(config, RunOptions(seeds=SEEDS, resume=True)) == 0
    assert_same_ends(directories_of(config), together)


def test_a_dry_run_starts_nothing_elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writers, "open", lambda self, after_step: pytest.fail("a writer was opened"))
    config = state_config(tmp_path, offline_steps=4, online_steps=0)
    assert run_experiment(config, RunOptions(dry_run=True)) == 0
    assert not list(tmp_path.iterdir())


def test_runs_with_other_data_act_apart(tmp_path: pathlib.Path) -> None:
    """Their norm statistics differ, so one policy cannot act for both."""
    config = state_config(tmp_path, data__data_dir="data/{task}")
    members = create_members(config, RunOptions(seeds=(0, 1), tasks=("a", "b")))
    assert _runs_that_act_together(members) == [(0, 1), (2, 3)]


def test_reports_of_each_run_and_of_all(together: list[pathlib.Path]) -> None:
    assert all((directory / "report.html").is_file() for directory in together)
    joint = together[0].with_name("run-seeds.md").read_text()
    assert "debug/run, seeds 3, 5, 8" in joint and "95 % interval" in joint


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({"seeds": (1, 2, 1)}, {}, "1 is given twice"),
        ({"tasks": ("a", "b")}, {}, "no field that changes what is trained contains {task}"),
        ({"tasks": ("a", "b")}, {"logging.project_name": "{task}"}, "all runs would be the same"),
        ({"tasks": ("a", "b")}, {"exp_name": "x-{task}"}, "leave {task} out"),
        ({}, {"env.id": "cube-{task}"}, "env.id contains {task}"),
        ({"tasks": ("a", "a")}, {"env.id": "cube-{task}"}, "a is given twice"),
        ({"seeds": (1, 2)}, {"online.async_actor": True}, "an actor process plays for one run"),
        ({"seeds": (1, 2)}, {"logging.debug": True}, "logging.debug looks at the updates of one run"),
        ({"seeds": (1, 2), "profile_steps": "1:2"}, {}, "--profile_steps looks at the updates of one run"),
    ],
)
def test_what_cannot_train_together(
    tmp_path: pathlib.Path, options: dict[str, object], overrides: dict[str, object], message: str
) -> None:
    config = apply_config_overrides(state_config(tmp_path), overrides)
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        create_members(config, RunOptions(**options))  # type: ignore[arg-type]


def test_seeds_and_tasks_name_their_runs(tmp_path: pathlib.Path) -> None:
    config = apply_config_overrides(
        state_config(tmp_path, exp_name="x"),
        {"env.id": "cube-{task}-v0", "data.rewards.reward_column": "reward.{task}"},
    )
    members = create_members(config, RunOptions(seeds=(0, 1), tasks=("task1", "task2")))
    assert [(m.exp_name, m.seed, m.env.id) for m in members] == [
        ("x-task1-seed0", 0, "cube-task1-v0"),
        ("x-task1-seed1", 1, "cube-task1-v0"),
        ("x-task2-seed0", 0, "cube-task2-v0"),
        ("x-task2-seed1", 1, "cube-task2-v0"),
    ]
    assert members[2].data.rewards.reward_column == "reward.task2"
    local = apply_config_overrides(config, {"data.repo_id": "lab/{task}", "data.data_dir": "/data/cubes"})
    [member] = create_members(local, RunOptions(tasks=("task1",)))
    assert (member.data.repo_id, member.data.data_dir) == ("lab/task1", "/data/cubes")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_refused_costs_no_other_run(tmp_path: pathlib.Path, overwrite: bool) -> None:
    """The second directory holds something else; the run in the first directory stays."""
    config = seeds_config(tmp_path, "run")
    first, second, third = directories_of(config)
    for directory in (first, second):
        directory.mkdir(parents=True)
        (directory / "notes.txt").write_text("mine")
    if overwrite:
        (first / CONFIG_FILE).write_text("name: x")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="not the directory of a run" if overwrite else "holds a run"):
        run_experiment(config, RunOptions(seeds=SEEDS, overwrite=overwrite))
    after = sorted(str(path) for path in tmp_path.rglob("*") if path.name != LOCK)
    assert after == before and not third.exists()


def task_config(directory: pathlib.Path, labels: str) -> RLTrainConfig:
    """Offline, on random episodes whose rewards come from a file of labels."""
    return state_config(
        directory, exp_name="run", offline_steps=6, online_steps=0, log_frequency=2, data__rewards__labels_file=labels
    )


@pytest.fixture
def labels(tmp_path: pathlib.Path) -> str:
    """Two tasks: the odd episodes succeed in one of them, the even episodes in the other."""
    for task, rest in (("left", 0), ("right", 1)):
        episodes = {i: Label(success=i % 2 == rest, length=60 + 7 * i) for i in range(8)}
        Labels(tmp_path / f"{task}.json", episodes).save()
    return str(tmp_path / "{task}.json")


def test_tasks_share_transitions_and_differ_in_rewards(
    tmp_path: pathlib.Path, labels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = task_config(tmp_path / "together", labels)
    assert run_experiment(config, RunOptions(tasks=("left", "right"))) == 0
    shown = capsys.readouterr().err
    assert "\nrun-left: offline 4/6 " in shown and "\nrun-right: offline 4/6 " in shown
    losses = {}
    for task in ("left", "right"):
        alone = task_config(tmp_path / task, labels.replace("{task}", task))
        assert run_experiment(alone, RunOptions()) == 0
        joint = metrics_of(run_directory(config).with_name(f"run-{task}"))
        losses[task] = [line["critic_loss"] for line in joint]
        expected = [line["critic_loss"] for line in metrics_of(run_directory(alone))]
        assert losses[task] == pytest.approx(expected, rel=TOLERANCE["rtol"])
    assert losses["left"] != losses["right"]


def cloning_config(directory: pathlib.Path, labels: str) -> RLTrainConfig:
    """The policy clones everything, so that both tasks have the same policy."""
    weights = {"acrlpd.loss_weights.actor_weight": 0.0, "acrlpd.loss_weights.bc_weight": 1.0}
    saves = {"training.save_frequency": 2, "checkpoints.max_to_keep": 10}
    return apply_config_overrides(task_config(directory, labels), weights | saves)


def test_tasks_that_only_clone_compute_one_policy(
    tmp_path: pathlib.Path, labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is its single run. The program of two runs is cheaper than two programs of one run."""
    flops = watch_flops(monkeypatch)
    config = cloning_config(tmp_path / "together", labels)
    assert run_experiment(config, RunOptions(tasks=("left", "right"))) == 0
    runs = [run_directory(config).with_name(f"run-{task}") for task in ("left", "right")]
    alone = cloning_config(tmp_path / "right", labels.replace("{task}", "right"))
    assert run_experiment(alone, RunOptions()) == 0
    for found, expected in zip(metrics_of(runs[1]), metrics_of(run_directory(alone)), strict=True):
        assert numbers(found) == pytest.approx(numbers(expected), rel=TOLERANCE["rtol"], abs=TOLERANCE["atol"])
    left, right = (arrays_of(run / "6") for run in runs)
    of_policy = [name for name in left if "policy" in name]
    assert of_policy and all(np.array_equal(left[name], right[name]) for name in of_policy)
    assert any(not np.array_equal(left[name], right[name]) for name in left if ".critics" in name)
    together, single = flops
    assert together < 1.8 * single

    # A kill finds the leader ahead of the other run, or behind it: both go on to the same end, to the last bit.
    for newest in ({"left": 4, "right": 2}, {"left": 2, "right": 6}):
        again = cloning_config(tmp_path / f"again{newest['left']}", labels)
        for task, run in zip(newest, runs, strict=True):
            target = run_directory(again).with_name(f"run-{task}")
            shutil.copytree(run, target)
            for step in saved_steps(target):
                if step > newest[task]:
                    shutil.rmtree(target / str(step))
        assert run_experiment(again, RunOptions(tasks=("left", "right"), resume=True)) == 0
        for task, run in zip(newest, runs, strict=True):
            assert_equal_arrays(arrays_of(run_directory(again).with_name(f"run-{task}") / "6"), arrays_of(run / "6"))


def test_a_run_with_another_policy_has_no_leader(tmp_path: pathlib.Path, labels: str) -> None:
    """As after settings were changed under which the policies of two tasks became different."""
    config = cloning_config(tmp_path, labels.replace("{task}", "left"))
    learner = Learner(create_sharding(config))
    for seed in (0, 0, 1):
        learner.add(create_initial_agent(config, learner.sharding, jax.random.key(seed)))
    learner.share_policies([0, 0, 0])
    assert [learner.leader(run) for run in range(3)] == [0, 0, 2]


def watch_flops(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects the operations of each program that a learner compiles."""
    compile_, found = Learner.compile, []

    def watched(self: Learner, calls: Any, kinds: Any) -> None:
        compile_(self, calls, kinds)
        costs = self.programs[True].cost_analysis()
        assert costs is not None
        found.append(costs["flops"])

    monkeypatch.setattr(Learner, "compile", watched)
    return found


def test_equal_columns_of_tasks_lie_on_the_devices_once(tmp_path: pathlib.Path, labels: str) -> None:
    config = task_config(tmp_path, labels)
    left, right = create_members(config, RunOptions(tasks=("left", "right")))
    sharding = create_sharding(config).data
    with (
        create_data_loader(left, device_sharding=sharding, num_runs=2) as first,
        create_data_loader(right, device_sharding=sharding, num_runs=2, like=first) as second,
    ):
        tables = [loader.sample_feed(1).table for loader in (first, second)]  # type: ignore[attr-defined]
    assert tables[0].observation.state is tables[1].observation.state
    assert tables[0].actions is tables[1].actions
    assert tables[0].rewards is not tables[1].rewards


def test_errors_and_messages_name_their_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two runs finds a broken batch."""
    sample_feed = DataLoader.sample_feed

    def broken(self: DataLoader, num_updates: int) -> Any:
        if self.state_dict()["seed"] == 1:
            logging.getLogger("acrlpd").warning("the disk is slow")
            raise OSError("the disk is gone")
        return sample_feed(self, num_updates)

    monkeypatch.setattr(DataLoader, "sample_feed", broken)
    words = ["--checkpoint_dir", str(tmp_path), "--exp_name", "run", "--seeds", "0", "1", "--no_wandb"]
    assert main(["train", "--config", "debug", "--max_steps", "2", "--online_steps", "0", *words]) == 2
    shown = capsys.readouterr().err
    assert "\nrun-seed1: the disk is slow\n" in shown
    assert f"the disk is gone\nin the run {tmp_path}/debug/run-seed1" in shown
