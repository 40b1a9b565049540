"""Offline, then online: what a run reports, what it keeps, and that a kill changes nothing of it."""

import json
import math
import pathlib
import random

import numpy as np
import pytest
from training_helpers import (
    Processes,
    arrays_of,
    assert_equal_arrays,
    metrics_of,
    online_config,
    problems_in,
    scored,
    train_here,
)

from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.runs.directory import read_summary, run_directory, saved_steps
from acrlpd.training.online.records import REPLAY
from acrlpd.training.online.rounds import episode_seed

OFFLINE, ONLINE = 13, 15
LAST = OFFLINE + ONLINE
START_STEPS, UPDATE_TO_DATA = 20, 0.2
WARMUP = 4
ROUND = 2  # episodes
LOST = 3  # the episode in which the environment fails


def config_of(directory: pathlib.Path, name: str) -> RLTrainConfig:
    # Lines of metrics, evaluations, checkpoints and phases end at different steps.
    return online_config(
        directory,
        exp_name=name,
        seed=0,
        env__id=f"toy_env:toy-raise-{episode_seed(0, LOST)}",
        offline_steps=OFFLINE,
        online_steps=ONLINE,
        online__start_steps=START_STEPS,
        online__update_to_data_ratio=UPDATE_TO_DATA,
        online__critic_warmup_steps=WARMUP,
        online__final_bc_weight=0.2,
        online__bc_weight_decay_steps=10,
        eval_frequency=8,
        save_frequency=5,
        log_frequency=3,
        checkpoints__max_to_keep=100,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = config_of(tmp_path_factory.mktemp("runs"), "straight")
    train_here(config)
    return run_directory(config)


def replay_of(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((directory / REPLAY).iterdir())}


def test_the_summary_says_how_both_phases_ended(straight: pathlib.Path) -> None:
    summary = read_summary(straight)
    assert summary["status"] == "finished"
    assert list(summary["evaluation"]) == ["offline", "online"]
    for phase, step in (("offline", OFFLINE), ("online", LAST)):
        found = summary["evaluation"][phase]
        low, high = found["interval"]
        assert (found["step"], found["episodes"]) == (step, 4)
        assert 0 <= low <= found["success_rate"] <= high <= 1
    records = [json.loads(path.read_text()) for path in sorted((straight / REPLAY).glob("round-*.json"))]
    episodes = [number for record in records for number in record["episodes"]]
    assert episodes == [number for number in range(ROUND * len(records)) if number != LOST]
    assert summary["online"] == {
        "env_steps": sum(sum(record["lengths"]) for record in records),
        "episodes": len(episodes),
        "successes": sum(sum(record["successes"]) for record in records),
        "lost_episodes": 1,
    }


def test_every_file_of_the_run_is_intact(straight: pathlib.Path) -> None:
    assert problems_in(straight) == []


def test_every_update_has_the_data_it_asks_for(straight: pathlib.Path) -> None:
    """At least start_steps + updates / ratio environment steps before each update, at most one round more."""
    events = [line for line in metrics_of(straight) if "online/env_steps" in line]
    lengths = np.diff([0, *(event["online/env_steps"] for event in events)])
    for update in range(ONLINE):
        there = [event["online/env_steps"] for event in events if event["step"] <= OFFLINE + update + 1]
        wanted = START_STEPS + math.ceil(update / UPDATE_TO_DATA)
        assert there[-1] >= wanted
        assert there[-1] - lengths[len(there) - 1] < wanted
    assert [event["online/lost_episodes"] for event in events] == [0, 1] + [0] * (len(events) - 2)


def test_evaluation_is_twice_as_frequent_online_and_at_the_end_of_each_phase(straight: pathlib.Path) -> None:
    steps = [line["step"] for line in metrics_of(straight) if "eval/success_rate" in line]
    assert steps == [8, 13, 16, 20, 24, 28]


def test_the_weight_of_cloning_moves_to_its_final_value(straight: pathlib.Path) -> None:
    lines = [line for line in metrics_of(straight) if "bc_weight" in line]
    assert [(line["step"], line["phase"]) for line in lines] == [
        *((step, "offline") for step in (3, 6, 9, 12, 13)),
        *((step, "online") for step in (15, 18, 21, 24, 27, 28)),
    ]
    of_step = dict.fromkeys(range(1, OFFLINE + 1), 1.0)
    of_step |= {OFFLINE + 1 + update: 1.0 - 0.8 * min(update / 10, 1.0) for update in range(ONLINE)}
    first = 1
    for line in lines:
        expected = np.mean([of_step[step] for step in range(first, line["step"] + 1)])
        assert line["bc_weight"] == pytest.approx(expected, abs=1e-6)
        first = line["step"] + 1


def test_critics_warm_up_while_the_policy_waits(straight: pathlib.Path) -> None:
    before, during, after = (arrays_of(straight / str(step)) for step in (OFFLINE, 15, 20))
    policy = [name for name in before if name.startswith((".policy_params", ".ema_params", ".policy_opt_state"))]
    critic = [name for name in before if name.startswith(".critics")]
    assert policy and critic and 15 < OFFLINE + WARMUP < 20
    assert_equal_arrays({name: during[name] for name in policy}, {name: before[name] for name in policy})
    assert not all(np.array_equal(during[name], before[name]) for name in critic)
    assert not all(np.array_equal(after[name], before[name]) for name in policy)
    losses = {line["step"]: "bc_loss" in line for line in metrics_of(straight) if "q_mean" in line}
    # Lines are means over three updates; a line in which the policy waited all the time has no loss of the policy.
    assert [losses[step] for step in (12, 15, 18, 21)] == [True, False, True, True]


def test_killed_in_a_round_and_at_a_random_step(
    straight: pathlib.Path, processes: Processes, tmp_path: pathlib.Path
) -> None:
    """Metrics, arrays and every file of the replay are those of the run that nobody killed."""
    config = config_of(tmp_path, "killed")
    directory = run_directory(config)
    killed = processes.run(config, order={"kill_after_writes": 1})
    assert killed.returncode == -9, killed.output
    assert [name.partition(".")[2] for name in replay_of(directory)] == ["npz"]  # one episode, no record of a round
    step = random.randrange(OFFLINE + 1, LAST)
    killed = processes.run(config, order={"kill_before_step": step}, resume=True)
    assert killed.returncode == -9, killed.output
    assert f"after step {OFFLINE}" in killed.output and "physics exploded" in killed.output
    train_here(config, resume=True)
    assert metrics_of(directory) == metrics_of(straight), f"killed before step {step}"
    assert_equal_arrays(arrays_of(directory / str(LAST)), arrays_of(straight / str(LAST)))
    assert replay_of(directory) == replay_of(straight)
    untimed = [
        {k: v for k, v in read_summary(d).items() if k in ("evaluation", "online")} for d in (directory, straight)
    ]
    assert untimed[0] == untimed[1]


def test_killed_before_the_first_save_of_a_run_without_an_offline_phase(
    processes: Processes, tmp_path: pathlib.Path
) -> None:
    config = online_config(tmp_path, offline_steps=0, online_steps=2, log_frequency=1)
    assert processes.run(config, order={"kill_before_step": 1}).returncode == -9
    train_here(config, resume=True)
    lines = metrics_of(run_directory(config))
    assert [line["step"] for line in lines if "eval/success_rate" in line] == [0, 2]  # each once
    assert [line["step"] for line in lines if "phase" in line] == [1, 2]


def test_a_run_that_was_offline_goes_online_as_if_it_had_been_meant_to(
    straight: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = config_of(tmp_path, "first_offline")
    directory = run_directory(config)
    offline = apply_config_overrides(config, online_steps=0)
    train_here(offline)
    train_here(config, resume=True, allow_changed=["training.online_steps"])
    assert metrics_of(directory) == metrics_of(straight)
    assert_equal_arrays(arrays_of(directory / str(LAST)), arrays_of(straight / str(LAST)))
    assert replay_of(directory) == replay_of(straight)


def test_either_phase_ends_when_nothing_improves_and_the_best_is_kept(tmp_path: pathlib.Path) -> None:
    scores = {"5": 0.1, "10": 0.5, "15": 0.4, "20": 0.3, "21": 0.2, "24": 0.6, "27": 0.1, "30": 0.1}
    config = online_config(
        tmp_path, offline_steps=100, online_steps=100, eval_frequency=5, save_frequency=7, early_stopping_patience=2
    )
    directory = run_directory(config)
    train_here(config, scored(scores))
    summary = read_summary(directory)
    assert (summary["status"], summary["final_step"]) == ("finished early: no improvement", 30)
    assert {phase: found["step"] for phase, found in summary["evaluation"].items()} == {"offline": 20, "online": 30}
    assert summary["best_evaluation"] == {"step": 24, "score": 0.6, "by": "success"}
    assert saved_steps(directory) == [24, 30]
