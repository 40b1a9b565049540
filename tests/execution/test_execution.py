"""How chunks are executed: open loop, and in a way that a user wrote in one file."""

import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
from ensembling import TemporalEnsembling
from toy_agent import toy_config
from toy_env import MAX_STEPS

from acrlpd.choice import kind_names
from acrlpd.config import apply_config_overrides, get_config, load_config, save_config, validate_config
from acrlpd.config.tree import from_dict, to_dict
from acrlpd.envs import Chunks, EnvError, EnvPool, rollouts
from acrlpd.envs.create import create_execution
from acrlpd.execution.base import ChunkExecution, Columns, Turn
from acrlpd.execution.open_loop import OpenLoop

HORIZON = 4


class CountingPolicy:
    """Action i of the chunk at step t is 0.001 * (10 * t + i), so that every executed number tells its origin."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        self.calls += 1
        steps = observations["observation.state"][:, 1]
        actions = 0.001 * (10 * steps[:, None] + np.arange(HORIZON))
        return Chunks(np.repeat(actions[..., None], 2, axis=2).astype(np.float32), {"q": steps})


def play(execution: ChunkExecution) -> tuple[np.ndarray, np.ndarray]:
    """The executed actions of one episode, which the time limit ends, and the steps at which the policy was asked."""
    with EnvPool("toy", 1, num_workers=0, cameras=()) as envs:
        [episode] = rollouts(envs, CountingPolicy(), [0], execution=execution)
    assert episode.length == MAX_STEPS
    np.testing.assert_array_equal(episode.values["q"], episode.chunk_steps)
    return episode.actions[:, 0], episode.chunk_steps


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_open_loop_executes_the_first_steps_of_every_chunk(steps: int) -> None:
    actions, asked = play(OpenLoop(steps))
    assert asked.tolist() == list(range(0, MAX_STEPS, steps))
    expected = [0.001 * (10 * (t - t % steps) + t % steps) for t in range(MAX_STEPS)]
    np.testing.assert_allclose(actions, expected, atol=1e-6)


def test_open_loop_without_a_number_executes_whole_chunks_or_those_of_the_critics() -> None:
    np.testing.assert_array_equal(play(OpenLoop())[0], play(OpenLoop(HORIZON))[0])
    assert OpenLoop().for_horizon(3) == OpenLoop(3) and OpenLoop(2).for_horizon(3) == OpenLoop(2)


def test_a_users_execution_remembers_what_is_left_of_chunks() -> None:
    actions, asked = play(TemporalEnsembling(decay=0.5))
    assert asked.tolist() == list(range(MAX_STEPS))
    for t in range(MAX_STEPS):
        said = [(0.5**age, 0.001 * (10 * (t - age) + age)) for age in range(min(t + 1, HORIZON))]
        expected = sum(weight * action for weight, action in said) / sum(weight for weight, _ in said)
        assert actions[t] == pytest.approx(expected, abs=1e-6)


def test_every_episode_has_its_own_memory() -> None:
    """Episodes that begin while others are under way act as episodes that are alone."""
    with EnvPool("toy", 3, num_workers=0, cameras=()) as envs:
        episodes = list(rollouts(envs, CountingPolicy(), range(7), execution=TemporalEnsembling()))
    alone = play(TemporalEnsembling())[0]
    for episode in episodes:
        np.testing.assert_array_equal(episode.actions[:, 0], alone)


def test_a_config_names_a_users_execution(tmp_path: pathlib.Path) -> None:
    assert kind_names(ChunkExecution) == ("open_loop",)
    changes = {"env.execution": "ensembling:TemporalEnsembling", "env.execution.decay": 0.25}
    config = apply_config_overrides(toy_config(), changes)
    assert create_execution(config) == TemporalEnsembling(decay=0.25)
    save_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml").env == config.env
    assert from_dict(type(config), to_dict(config)) == config


def test_replan_steps_is_short_for_the_steps_of_an_open_loop() -> None:
    config = apply_config_overrides(get_config("debug"), {"env.replan_steps": 2})
    assert config.env.execution == OpenLoop(2)
    assert not [message for message in validate_config(config).errors if "env." in message]


class Idle(OpenLoop):
    def act(self, *args: object, **kwargs: object) -> list[Turn]:
        return [Turn(np.zeros((0, 2), np.float32), {})]


def test_an_execution_that_does_nothing_is_refused() -> None:
    with pytest.raises(EnvError, match="executes no step of a chunk"):
        play(Idle(1))
