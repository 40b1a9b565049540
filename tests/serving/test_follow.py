"""A newer checkpoint of the run is served without a connection being lost."""

import time
from pathlib import Path

import numpy as np
import pytest
from serving_helpers import RunningServer, ask, make_agent, save_run, state_config, state_observation

from acrlpd.serving.follow import follow_run
from acrlpd.serving.policy_checkpoint import open_policy_checkpoint
from acrlpd.serving.served_model import choose_actions
from acrlpd.serving.serving_policy import ServingPolicy, load_serving_policy


def load(path: Path) -> ServingPolicy:
    policy = load_serving_policy(open_policy_checkpoint(path), max_batch_size=2)
    policy.warm_up()
    return policy


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
        wait_for(lambda: server.server.metrics.reloads["error"] == 1)
        assert ask(connection, message)["checkpoint_step"] == 10
        (run / "15").rmdir()

        save_run(run, config, {20: make_agent(config, 1)})
        wait_for(lambda: server.server.policy.step == 20)
        after = ask(connection, message)
        assert after["checkpoint_step"] == 20 and server.server.metrics.reloads == {"ok": 1, "error": 1}
        assert not np.allclose(after["actions"], before["actions"])
        assert choose_actions._cache_size() == compiled
        follower.cancel()
    policy = load(run)
    [expected] = policy.infer([policy.prepare(message)])
    assert isinstance(expected, dict)
    np.testing.assert_array_equal(after["actions"], expected["actions"])


def wait_for(condition: object, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            pytest.fail("waited too long")
        time.sleep(0.02)
