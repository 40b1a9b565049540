"""A newer checkpoint of the run is served without a connection being lost."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_helpers import RunningServer, ask, state_observation, wait_for
from small_checkpoints import make_agent, save_run, state_config

from acrlpd.policies.acting_model import choose_actions
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.robots.droid import Droid
from acrlpd.serving import follow
from acrlpd.serving.follow import follow_run
from acrlpd.serving.serving_policy import ServingPolicy, load_serving_policy
from acrlpd.training.going_back import set_aside_newer


def load(path: Path) -> ServingPolicy:
    policy = load_serving_policy(open_checkpoint(path), max_batch_size=2)
    policy.warm_up()
    return policy


def reloads(server: RunningServer) -> tuple[float, float]:
    """How many checkpoints were loaded, and how many could not be served."""
    values = server.scrape()
    return values['acrlpd_reloads_total{result="ok"}'], values['acrlpd_reloads_total{result="error"}']


def test_newer_checkpoints_are_served(tmp_path: Path) -> None:
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config, 0)})
    message = state_observation() | {"seed": 1}
    with RunningServer(load(run)) as server, server.connect() as connection:
        follower = server.run(follow_run(server.server, run, load, poll_seconds=0.05))
        before = ask(connection, message)
        assert before["checkpoint_step"] == 10
        compiled = choose_actions._cache_size()

        (run / "15").mkdir()  # not a checkpoint: reported, and left alone
        wait_for(lambda: reloads(server)[1] == 1)
        assert ask(connection, message)["checkpoint_step"] == 10
        (run / "15").rmdir()

        save_run(run, config, {20: make_agent(config, 1)})
        wait_for(lambda: server.server.policy.step == 20)
        after = ask(connection, message)
        assert after["checkpoint_step"] == 20 and reloads(server) == (1, 1)
        assert not np.allclose(after["actions"], before["actions"])
        assert choose_actions._cache_size() == compiled
        follower.cancel()
    policy = load(run)
    [expected] = policy.infer([policy.prepare(message)])
    assert isinstance(expected, dict)
    np.testing.assert_array_equal(after["actions"], expected["actions"])


def test_another_runs_step_does_not_hold_up_the_first_reload(tmp_path: Path) -> None:
    config = state_config()
    old = save_run(tmp_path / "old", config, {29_999: make_agent(config, 0)})
    new = save_run(tmp_path / "new", config, {10: make_agent(config, 1)})
    with RunningServer(load(old)) as server:
        follower = server.run(follow_run(server.server, new, load, poll_seconds=0.05))
        wait_for(lambda: server.server.policy.step == 10)
        save_run(new, config, {20: make_agent(config, 2)})
        wait_for(lambda: server.server.policy.step == 20)
        follower.cancel()
        assert reloads(server) == (2, 0)


def test_a_run_that_goes_back_is_followed_there(tmp_path: Path) -> None:
    """`acrlpd train --resume 20` sets aside what came after step 20, and the server must not go on with it."""
    config = state_config()
    run = save_run(tmp_path / "run", config, {step: make_agent(config, step) for step in (20, 30)})
    with RunningServer(load(run)) as server:
        follower = server.run(follow_run(server.server, run, load, poll_seconds=0.05))
        assert server.server.policy.step == 30
        set_aside_newer(run, 20)
        wait_for(lambda: server.server.policy.step == 20)
        save_run(run, config, {25: make_agent(config, 25)})
        wait_for(lambda: server.server.policy.step == 25)
        follower.cancel()
        assert reloads(server) == (2, 0)


def test_clients_keep_what_they_were_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run's directory has become that of another policy; who is connected goes on with the one that was."""
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config, 0)})
    policy = load(run)
    longer = dataclasses.replace(config.model, action_horizon=config.model.action_horizon + 1)
    other_robot = dataclasses.replace(config, data=dataclasses.replace(config.data, robot=Droid()))

    def changed_policy(**changes: Any) -> ServingPolicy:
        return dataclasses.replace(policy, policy=dataclasses.replace(policy.policy, **changes))

    others = {
        20: changed_policy(rl_config=dataclasses.replace(config, model=longer)),
        30: changed_policy(best_of_n=1),
        40: dataclasses.replace(policy, num_steps=(7,)),
        50: dataclasses.replace(policy, spec=dataclasses.replace(policy.spec, states={"joints": None})),
        60: changed_policy(rl_config=other_robot),
    }
    changed = ["action_horizon", "best_of_n", "num_steps", "observation", "robot"]
    with RunningServer(policy) as server, caplog.at_level(logging.ERROR, follow.__name__):
        follower = server.run(follow_run(server.server, run, lambda path: others[int(path.name)], poll_seconds=0.05))
        for step, name in zip(others, changed, strict=True):
            (run / str(step)).mkdir()
            told = f"step {step} cannot be served: it is not what connected clients were told: {name} "
            wait_for(lambda told=told: told in caplog.text or reloads(server)[0])
        assert server.server.policy is policy
        follower.cancel()


def test_a_run_that_cannot_be_read_for_a_moment_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_steps, looks = follow.saved_steps, 0

    def flaky(directory: Path) -> list[int]:
        nonlocal looks
        looks += 1
        if looks in (2, 3):
            raise OSError(116, "Stale file handle")
        return saved_steps(directory)

    monkeypatch.setattr(follow, "saved_steps", flaky)
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config, 0)})
    with RunningServer(load(run)) as server, caplog.at_level(logging.WARNING, follow.__name__):
        follower = server.run(follow_run(server.server, run, load, poll_seconds=0.05))
        wait_for(lambda: looks > 3)
        save_run(run, config, {20: make_agent(config, 1)})
        wait_for(lambda: server.server.policy.step == 20)
        follower.cancel()
    assert sum("Stale file handle" in record.message for record in caplog.records) == 1


def test_directories_with_odd_names_do_not_end_the_search(tmp_path: Path) -> None:
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config, 0)})
    for name in ("²", "٣", "007", "-5"):
        (run / name).mkdir()
    with RunningServer(load(run)) as server:
        follower = server.run(follow_run(server.server, run, load, poll_seconds=0.05))
        save_run(run, config, {20: make_agent(config, 1)})
        wait_for(lambda: server.server.policy.step == 20)
        follower.cancel()
        assert reloads(server) == (1, 0)


def test_a_search_that_ends_by_an_error_says_so_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_steps, is_broken = follow.saved_steps, True

    def broken(directory: Path) -> list[int]:
        return [1 // 0] if is_broken else saved_steps(directory)

    monkeypatch.setattr(follow, "saved_steps", broken)
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config, 0)})
    with RunningServer(load(run)) as server, caplog.at_level(logging.WARNING, follow.__name__):
        assert (server.get("/healthz"), server.scrape()["acrlpd_following"]) == ((200, "OK\n"), 0)
        follower = server.run(follow_run(server.server, run, load, poll_seconds=0.05, restart_seconds=0.2))
        told = "OK\n--follow has ended by an error and begins again; see the log\n"
        wait_for(lambda: server.get("/healthz") == (200, told))
        wait_for(lambda: server.scrape()["acrlpd_follow_restarts_total"] >= 2)
        is_broken = False
        save_run(run, config, {20: make_agent(config, 1)})
        wait_for(lambda: server.server.policy.step == 20)
        assert (server.get("/healthz"), server.scrape()["acrlpd_following"]) == ((200, "OK\n"), 1)
        follower.cancel()
    assert f"following {run} ended by an error; it begins again in 0.2 s" in caplog.text
    assert "ZeroDivisionError" in caplog.text
