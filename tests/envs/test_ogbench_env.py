"""OGBench: the observations of policies, the time of a success, and episodes that repeat."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_marks import needs_egl, needs_ogbench

from acrlpd.envs import Env, EnvError, make_env
from acrlpd.envs.ogbench_env import CAMERA, RAW_STATE, cube_features
from acrlpd.experts.ogbench import OGBenchExpert

CUBE = "cube-single-play-singletask-v0"


@pytest.fixture(scope="module")
def cube() -> Env:
    return make_env(CUBE)


def play(env: Env, seed: int, actions: np.ndarray) -> list[np.ndarray]:
    env.reset(seed)
    states = [env.observe()["observation.state"]]
    for action in actions:
        env.step(action)
        states.append(env.observe()["observation.state"])
    return states


def random_actions(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (count, 5)).astype(np.float32)


@needs_ogbench
@pytest.mark.parametrize(
    ("name", "features", "prompt"),
    [
        (CUBE, {"observation.state": 20, RAW_STATE: 28}, "move the cube"),
        ("cube-double-singletask-task4-v0", {"observation.state": 33, RAW_STATE: 37}, "move the cubes: swap"),
        ("cube-triple-noisy-singletask-v0", {"observation.state": 46, RAW_STATE: 46}, "move the cubes"),
        ("scene-play-singletask-v0", {"observation.state": 40, RAW_STATE: 40}, "rearrange the scene"),
        ("puzzle-3x3-play-singletask-v0", {"observation.state": 55, RAW_STATE: 55}, "solve the puzzle"),
    ],
)
def test_every_family_steps_and_repeats(name: str, features: dict[str, int], prompt: str) -> None:
    env = make_env(name)
    assert {column: feature.shape[0] for column, feature in env.spec.features.items()} == features
    assert (env.prompt, env.spec.action_dim, env.spec.fps) == (prompt, 5, 20)
    first = play(env, 3, random_actions(12))
    play(env, 4, random_actions(3))
    np.testing.assert_array_equal(first, play(env, 3, random_actions(12)))


@needs_ogbench
def test_environments_of_one_kind_do_not_disturb_each_other(cube: Env) -> None:
    alone = play(cube, 1, random_actions(20))
    twin = make_env(CUBE)
    cube.reset(1)
    twin.reset(2)
    together = [cube.observe()["observation.state"]]
    for mine, other in zip(random_actions(20), random_actions(20, seed=1), strict=True):
        twin.step(other)
        cube.step(mine)
        together.append(cube.observe()["observation.state"])
    np.testing.assert_array_equal(alone, together)


@needs_ogbench
def test_states_are_those_of_the_benchmark(cube: Env) -> None:
    """OGBench's own environment differs only by the unseeded noise in its resets, which is tiny."""
    import gymnasium

    stock = gymnasium.make("cube-single-singletask-v0")
    expected = [stock.reset(seed=5)[0]]
    expected += [stock.step(action)[0] for action in random_actions(10)]
    cube.reset(5)
    found = [cube.observe()[RAW_STATE]]
    for action in random_actions(10):
        cube.step(action)
        found.append(cube.observe()[RAW_STATE])
    np.testing.assert_allclose(found, expected, atol=5e-3)


@needs_ogbench
def test_success_belongs_to_the_action_that_caused_it(cube: Env) -> None:
    cube.reset(0)
    expert = OGBenchExpert(cube, "expert", np.random.default_rng(0))
    steps = []
    while not steps or not steps[-1].done:
        steps.append(cube.step(expert.act()))
    cube_now = cube.observe()[RAW_STATE][19:22] / 10 + [0.425, 0, 0]
    assert np.linalg.norm(cube_now - [0.5, 0.0, 0.02]) <= 0.04
    assert [step.reward for step in steps] == [-1.0] * (len(steps) - 1) + [0.0]
    assert steps[-1].terminated and steps[-1].success and not steps[-2].success


@needs_ogbench
def test_actions_beyond_the_bounds_are_cut(cube: Env) -> None:
    ones = np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(play(cube, 0, 3 * ones), play(cube, 0, ones))


@needs_ogbench
@pytest.mark.parametrize("name", ["cube-single-v0", "cube-hundred-play-singletask-v0"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(EnvError, match=f"unknown OGBench environment '{name}'"):
        make_env(name)


def raw_state(effector: list[float], yaw: float, cube: list[float], cube_yaw: float) -> np.ndarray:
    raw = np.zeros(28)
    raw[12:15], raw[15:17] = effector, [np.cos(yaw), np.sin(yaw)]
    raw[17:19] = [1.5, 0.25]
    raw[19:22], raw[26:28] = cube, [np.cos(cube_yaw), np.sin(cube_yaw)]
    return raw


positions = st.lists(st.floats(-3, 3), min_size=3, max_size=3)
angles = st.floats(-np.pi, np.pi)


@given(positions, angles, positions, angles, st.integers(0, 3))
def test_cube_features(effector: list, yaw: float, cube: list, cube_yaw: float, quarter_turns: int) -> None:
    features = cube_features(raw_state(effector, yaw, cube, cube_yaw))
    assert features.shape == (20,)
    offset = np.subtract(cube, effector)
    np.testing.assert_allclose(features[:3], effector, atol=1e-6)
    np.testing.assert_allclose(features[5:7], [1.5, 0.25])
    np.testing.assert_allclose(features[12:15], offset, atol=1e-5)
    np.testing.assert_allclose(features[15:18], np.tanh(3 * offset), atol=1e-5)
    difference = 4 * (cube_yaw - yaw)
    np.testing.assert_allclose(features[18:], [np.cos(difference), np.sin(difference)], atol=1e-5)
    turned = cube_features(raw_state(effector, yaw, cube, cube_yaw + quarter_turns * np.pi / 2))
    np.testing.assert_allclose(turned[18:], features[18:], atol=1e-5)


@needs_ogbench
@needs_egl
def test_images_are_rendered_only_for_an_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env("visual-cube-single-play-singletask-v0", image_size=(48, 64))
    renders = []
    render = env.env.render
    monkeypatch.setattr(env.env, "render", lambda: renders.append(1) or render())
    env.reset(0)
    for action in random_actions(5):
        env.step(action)
    assert not renders
    before = env.observe()
    env.step(np.ones(5, np.float32))
    after = env.observe()
    assert len(renders) == 2
    assert before[CAMERA].shape == (48, 64, 3) and before[CAMERA].std() > 10
    assert not np.array_equal(before[CAMERA], after[CAMERA])
    assert set(before) == {"observation.state", CAMERA}
    assert before["observation.state"].shape == (13,)
    env.close()
