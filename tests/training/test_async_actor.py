"""An actor process beside the learner: it feeds it, either may die, and neither waits for a dead one."""

import errno
import os
import pathlib
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from async_toy import GO_ON, HELD_AFTER
from toy_env import MAX_STEPS
from training_helpers import WAIT_S, Processes, arrays_of, finish, metrics_of, online_config

from acrlpd.envs import EnvError
from acrlpd.policies.checkpoint import load_policy, open_checkpoint
from acrlpd.runs.directory import read_summary, run_directory, saved_steps
from acrlpd.training.online.actor import LOG_FILE, publish
from acrlpd.training.online.records import REPLAY, Round, read_rounds
from acrlpd.training.online.rounds import episode_seed, policy_seed

OFFLINE, ONLINE = 4, 40


def wait_for(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.02)


def actors_of(learner: int) -> list[int]:
    """The actor processes that a learner has started and that are running."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended since
            continue
        if parent == learner and b"acrlpd.training.online.actor" in arguments:
            found.append(int(path.name))
    return found


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_actor_and_learner_survive_each_other(
    processes: Processes, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor is killed and replaced; the learner is killed, the actor ends; a resumed run comes to its end."""
    config = online_config(
        tmp_path,
        env__id="async_toy:slow-toy",
        env__timeout_s=3600.0,
        offline_steps=OFFLINE,
        online_steps=ONLINE,
        online__async_actor=True,
        online__actor_refresh_steps=5,
        online__start_steps=50,
        online__update_to_data_ratio=0.1,
        save_frequency=10,
        checkpoints__max_to_keep=100,
    )
    directory = run_directory(config)
    # Until the learner is killed, there is data for its first checkpoint (100 steps), but not for its end (440).
    assert 2 * 4 * HELD_AFTER >= 100 and 2 * MAX_STEPS * (HELD_AFTER + 1) < 440
    monkeypatch.setenv("TOY_HOLD", str(directory))
    learner = processes.start(config)
    wait_for("the first round", lambda: read_rounds(directory / REPLAY, 0) or learner.poll() is not None)
    (actor,) = actors_of(learner.pid)
    os.kill(actor, signal.SIGKILL)
    wait_for("another actor", lambda: [a for a in actors_of(learner.pid) if a != actor] or learner.poll() is not None)
    wait_for("a checkpoint", lambda: saved_steps(directory)[-1:] > [OFFLINE] or learner.poll() is not None)
    assert learner.poll() is None, finish(learner).output
    (actor,) = actors_of(learner.pid)
    learner.kill()
    (directory / GO_ON).touch()
    killed = finish(learner)
    assert "the actor process ended with exit code -9" in killed.output
    assert "Starting it again" in killed.output
    wait_for("the actor to end", lambda: not is_running(actor))
    num_before = len(read_rounds(directory / REPLAY, 0))

    resumed = processes.start(config, resume=True)
    ended = finish(resumed)
    assert ended.returncode == 0, ended.output
    assert not actors_of(resumed.pid)
    summary = read_summary(directory)
    rounds = read_rounds(directory / REPLAY, 0)
    events = [line for line in metrics_of(directory) if "online/env_steps" in line]
    assert summary["final_step"] == OFFLINE + ONLINE
    assert summary["online"]["env_steps"] >= 50 + (ONLINE - 1) / 0.1
    assert summary["online"]["env_steps"] == events[-1]["online/env_steps"] <= sum(r.env_steps for r in rounds)
    # Every round was taken once, and the policy that plays is the learner's, a few updates old.
    assert [event["online/policy_step"] for event in events] == [r.policy_step for r in rounds[: len(events)]]
    played_by = [event["online/policy_step"] for event in events]
    assert played_by[0] == OFFLINE and played_by[-1] > OFFLINE
    # Before the kill it may have been a policy of updates after the checkpoint, which were lost.
    assert events[num_before:]
    assert all(event["online/policy_step"] < event["step"] for event in events[num_before:])
    assert arrays_of(directory / str(OFFLINE + ONLINE))[".step"] == OFFLINE + ONLINE
    assert_played_by(directory / str(OFFLINE), directory / REPLAY, rounds[0])


def assert_played_by(checkpoint: pathlib.Path, replay: pathlib.Path, played: Round) -> None:
    """What the actor did in a round is what the policy of the checkpoint does, chunk by chunk."""
    opened = open_checkpoint(checkpoint)
    policy, steps = load_policy(opened), opened.rl_config.qchunking.horizon_length
    assert (opened.step, played.number) == (played.policy_step, 0) and played.episodes
    for number, length in zip(played.episodes, played.lengths, strict=True):
        with np.load(replay / f"episode-{number:08d}-{length}.npz") as shard:
            states, actions = shard["column/observation.state"], shard["column/action"]
        for turn, start in enumerate(range(0, length, steps)):
            source = [policy_seed(opened.rl_config.seed, 0), episode_seed(opened.rl_config.seed, number), turn]
            noise = int(np.random.SeedSequence(source).generate_state(1)[0])
            chunks = policy({"observation.state": states[start : start + 1]}, ["go right"], [noise])
            executed = actions[start : start + steps]
            np.testing.assert_allclose(np.clip(chunks.actions[0, : len(executed)], -1, 1), executed, atol=1e-4)


@pytest.mark.slow
def test_an_actor_that_cannot_start_ends_the_run(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = online_config(tmp_path, env__id="async_toy:actorless-toy", offline_steps=4, online__async_actor=True)
    result = processes.run(config, order={"max_actor_starts": 1})
    assert result.returncode == 1
    error = result.output[result.output.rindex("EnvError: the actor process ended with exit code 1") :]
    assert "its model file is missing" in error  # the end of the actor's log
    assert "No actor finished a round in 1 starts: giving up" in error
    assert "Traceback" in (run_directory(config) / LOG_FILE).read_text()
    assert saved_steps(run_directory(config)) == [4]


def test_a_policy_that_cannot_be_published_takes_no_space(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_space(path: pathlib.Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "write_bytes", run_out_of_space)
    with pytest.raises(EnvError, match=r"the policy for the actor process, could not be written.*No space left"):
        publish(tmp_path, {"kernel": np.zeros(1000)}, 7)
    assert not list(tmp_path.iterdir())
