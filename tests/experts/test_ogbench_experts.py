"""The scripted OGBench expert does every kind of task, and fails on purpose."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_marks import needs_ogbench

from acrlpd.envs import Env, EnvError, Rollout, make_env
from acrlpd.envs.episodes import execute_chunk
from acrlpd.experts.expert import demonstrate, find_expert
from acrlpd.experts.ogbench import OGBenchExpert
from acrlpd.experts.ogbench_goals import solve_lights_out


def play(env: Env, seed: int, quality: str) -> Rollout:
    return demonstrate(env, OGBenchExpert, seed, quality)


@needs_ogbench
@pytest.mark.parametrize(
    "name",
    [
        "cube-double-play-singletask-task4-v0",  # swap: a cube must get out of the way first
        "cube-triple-play-singletask-task3-v0",  # take a stack apart
        "scene-play-singletask-task4-v0",  # unlock, open, put in, close
        "puzzle-3x3-play-singletask-v0",
    ],
)
def test_the_expert_solves(name: str) -> None:
    rollout = play(make_env(name), 0, "expert")
    assert rollout.succeeded and rollout.terminated


@needs_ogbench
def test_qualities_of_cube_single() -> None:
    env = make_env("cube-single-play-singletask-v0", max_episode_steps=100)
    expert = [play(env, seed, "expert") for seed in range(3)]
    mixed = [play(env, seed, "mixed") for seed in range(6)]
    assert all(rollout.succeeded for rollout in expert)
    assert 0 < sum(rollout.succeeded for rollout in mixed) < 6
    assert all(rollout.length == 100 for rollout in mixed if not rollout.succeeded)
    again = play(env, 4, "mixed")
    np.testing.assert_array_equal(again.actions, mixed[4].actions)
    np.testing.assert_array_equal(again.observations["observation.state"], mixed[4].observations["observation.state"])
    env.reset(expert[0].seed)
    replayed = execute_chunk(env, expert[0].actions, record=False, film=False)
    np.testing.assert_array_equal(replayed.rewards, expert[0].rewards)
    assert replayed.terminated


@needs_ogbench
def test_a_success_with_a_detour_is_slow() -> None:
    env = make_env("cube-single-play-singletask-v0", max_episode_steps=200)
    rollouts = [play(env, seed, "detours") for seed in range(6)]
    lengths = [rollout.length for rollout in rollouts if rollout.succeeded]
    assert 0 < len(lengths) < 6 and min(lengths) > 100  # the expert needs about 63 steps


def test_every_family_has_the_expert_with_its_qualities() -> None:
    for name in ("cube-single-play-singletask-v0", "visual-scene-play-singletask-v0", "puzzle-3x3-singletask-v0"):
        assert find_expert(name, ("expert", "noisy", "mixed", "detours", "play")) is OGBenchExpert
    with pytest.raises(EnvError, match="has the qualities expert, noisy, mixed, detours, play; found 'perfect'"):
        find_expert("cube-single-play-singletask-v0", ("perfect",))


@needs_ogbench
def test_the_global_generator_keeps_its_state() -> None:
    env = make_env("cube-single-play-singletask-v0")
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.random(3)  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    env.reset(0)
    OGBenchExpert(env, "play", np.random.default_rng(0)).act()
    np.testing.assert_array_equal(np.random.random(3), expected)  # noqa: NPY002


def press(board: np.ndarray, buttons: np.ndarray) -> np.ndarray:
    """Lights out, played by hand."""
    board = board.copy()
    rows, columns = board.shape
    for row, column in itertools.product(range(rows), range(columns)):
        if buttons[row, column]:
            for dr, dc in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
                if 0 <= row + dr < rows and 0 <= column + dc < columns:
                    board[row + dr, column + dc] ^= 1
    return board


@given(st.sampled_from([(3, 3), (4, 4), (4, 5)]), st.data())
def test_lights_out_is_solved(shape: tuple[int, int], data: st.DataObject) -> None:
    """A board that presses have made can be solved; other boards of 4 x 4 buttons may have no solution."""
    size = shape[0] * shape[1]
    presses = np.array(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))).reshape(shape)
    board = press(np.zeros(shape, int), presses)
    solution = solve_lights_out(board.ravel(), *shape).reshape(shape)
    assert not press(board, solution).any()


def test_an_unsolvable_board_is_refused() -> None:
    board = np.zeros(16, int)
    board[0] = 1
    with pytest.raises(ValueError, match="no presses turn"):
        solve_lights_out(board, 4, 4)
