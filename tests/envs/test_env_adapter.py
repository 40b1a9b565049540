"""The adapter: names, limits, seeds, and a clear message for everything that an environment can do wrong."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sim_marks import needs_gymnasium, needs_ogbench
from toy_env import FAULT_STEP, MAX_STEPS, Toy, ToyEnv, make_toy

from acrlpd.envs import EnvError, make_env, make_gymnasium, register_env, registry
from acrlpd.envs.env import Env, flatten_observation
from acrlpd.envs.episodes import execute_chunk, start_episode
from acrlpd.envs.simulators import choose_backend

RIGHT = np.array([1.0, 0.0], np.float32)
STAY = np.zeros(2, np.float32)


def play(env: Env, seed: int, action: np.ndarray) -> list:
    env.reset(seed)
    steps = [env.step(action)]
    while not steps[-1].done:
        steps.append(env.step(action))
    return steps


def test_spec_describes_observations_and_actions() -> None:
    spec = make_env("toy").spec
    assert spec.features["observation.state"].shape == (3,)
    assert spec.features["observation.images.side"].dtype == "video"
    assert spec.cameras == ("observation.images.side",)
    assert (spec.action_dim, spec.action_column, spec.fps) == (2, "action", 10)


def test_a_success_terminates_and_a_time_limit_truncates() -> None:
    env = make_env("toy")
    success, limit = play(env, 0, RIGHT)[-1], play(env, 0, STAY)
    assert (success.terminated, success.truncated, success.success) == (True, False, True)
    assert (limit[-1].terminated, limit[-1].truncated, limit[-1].success) == (False, True, False)
    assert len(limit) == MAX_STEPS


def test_a_success_in_the_last_step_is_terminal_not_truncated() -> None:
    steps = len(play(make_env("toy"), 0, RIGHT))
    last = play(make_env("toy", max_episode_steps=steps), 0, RIGHT)[-1]
    assert last.terminated and not last.truncated


def test_episodes_follow_from_their_seed() -> None:
    env = make_env("toy")
    states = []
    for seed in (5, 6, 5):
        env.reset(seed)
        env.step(RIGHT)
        states.append(env.observe()["observation.state"])
    np.testing.assert_array_equal(states[0], states[2])
    assert not np.array_equal(states[0], states[1])


def test_actions_are_cut_to_the_bounds_unless_clipping_is_off() -> None:
    loud = np.array([5.0, -5.0], np.float32)
    np.testing.assert_array_equal(make_env("toy").executed(loud), [1.0, -1.0])
    unbounded = ToyEnv(Toy("toy"), name="toy", prompt="", fps=10, clip_actions=False)
    np.testing.assert_array_equal(unbounded.executed(loud), loud)


def test_images_stay_as_they_are_where_a_simulator_draws_into_one_array() -> None:
    class OneCanvas(Toy):
        canvas = np.zeros((16, 24, 3), np.uint8)

        def render(self) -> np.ndarray:
            self.canvas[:] = super().render()
            return self.canvas

    def play_and_film(simulator: Toy) -> list[np.ndarray]:
        env = ToyEnv(simulator, name="toy", prompt="", fps=10)
        _, first, filmed = start_episode(env, 0, film=True)
        executed = execute_chunk(env, np.stack([RIGHT] * 3), record=True, film=True)
        seen = [columns["observation.images.side"] for columns in first + executed.observations]
        return [*seen, *filmed, *executed.video]

    found, expected = play_and_film(OneCanvas("toy")), play_and_film(Toy("toy"))
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found[0], found[3])


def test_only_wanted_cameras_are_rendered_and_only_for_an_observation() -> None:
    blind, seeing = make_env("toy", cameras=()), make_env("toy")
    assert blind.spec.cameras == ()
    before = seeing.env.renders
    for env in (blind, seeing):
        env.reset(0)
        env.step(RIGHT)
    assert (blind.env.renders, seeing.env.renders) == (0, before)
    assert seeing.observe()["observation.images.side"].shape == (16, 24, 3)
    with pytest.raises(EnvError, match=r"no camera 'observation\.images\.front'.*observation\.images\.side"):
        make_env("toy", cameras=["observation.images.side", "observation.images.front"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "it raised ZeroDivisionError: physics exploded"),
        ("reward", "the reward is inf"),
        ("nan", r"observation\.state is not finite: \[nan"),
        ("shape", r"observation\.state has shape \[5\], expected \[3\]"),
    ],
)
def test_faults_name_environment_seed_and_step(fault: str, words: str) -> None:
    env = make_env(f"toy-{fault}-4", cameras=())
    env.reset(4)
    where = f"environment 'toy-{fault}-4', seed 4, step {FAULT_STEP - (fault in ('raise',))}"
    with pytest.raises(EnvError, match=f"{where}: {words}"):
        for _ in range(FAULT_STEP):
            env.step(STAY)
            env.observe()


@pytest.mark.parametrize("reward", ["high", "1.0", b"1.0", None, [1.0, 2.0], np.nan])
def test_a_reward_that_is_no_number_names_the_environment(reward: object) -> None:
    class Odd(Toy):
        def step(self, action: np.ndarray) -> tuple:
            raw, _, *rest = super().step(action)
            return raw, reward, *rest

    env = ToyEnv(Odd("toy"), name="odd", prompt="", fps=10, cameras=())
    env.reset(7)
    with pytest.raises(EnvError, match=r"environment 'odd', seed 7, step 1: the reward is .*, expected a finite"):
        env.step(STAY)


@pytest.mark.parametrize("action", [np.zeros(3), np.array([0.0, np.nan])])
def test_a_bad_action_is_refused(action: np.ndarray) -> None:
    env = make_env("toy")
    env.reset(0)
    with pytest.raises(EnvError, match="an action must be 2 finite numbers"):
        env.step(action)


def test_a_step_before_a_reset_is_refused() -> None:
    with pytest.raises(EnvError, match="call reset first"):
        make_env("toy").step(STAY)


def test_an_environment_that_says_nothing_about_success_is_refused() -> None:
    env = make_env("toy-silent-1")
    env.reset(0)
    with pytest.raises(EnvError, match=r"does not say whether the task is done.*register_env"):
        env.step(STAY)


def test_actions_must_be_a_vector() -> None:
    toy = Toy("toy")
    toy.action_space = SimpleNamespace(n=4)
    with pytest.raises(EnvError, match="actions must be a vector of numbers"):
        ToyEnv(toy, name="levers", prompt="", fps=10)


def test_gymnasium_observations_get_the_names_of_dataset_columns() -> None:
    image, vector = np.zeros((4, 4, 3), np.uint8), np.zeros(3)
    assert set(flatten_observation(vector)) == {"observation.state"}
    assert set(flatten_observation(image)) == {"observation.image"}
    nested = {"pixels": {"top": image}, "agent_pos": vector, "force": vector}
    expected = {"observation.images.top", "observation.state", "observation.force"}
    assert set(flatten_observation(nested)) == expected


@pytest.mark.parametrize("second", [{"state": np.ones(3)}, {"right": {"agent_pos": np.ones(3)}}])
def test_two_parts_of_an_observation_with_one_name_are_refused(second: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match=r"would be called observation\.state, one of them .(state|right).\. Give it"):
        flatten_observation({"agent_pos": np.zeros(3)} | second)


def test_a_success_function_that_raises_is_named() -> None:
    env = make_env("toy").env
    asked = Env(env, name="toy", prompt="", fps=1, success=lambda reward, terminated, info: info["distance"] < 1)
    asked.reset(5)
    with pytest.raises(EnvError, match=r"'toy', seed 5, step 1: its success function raised KeyError: 'distance'"):
        asked.step(np.zeros(2, np.float32))


def test_an_unknown_camera_is_refused_with_the_names_of_the_others() -> None:
    expected = r"'toy' has no camera 'top'; it has observation\.images\.side\. Give it the dataset's names"
    with pytest.raises(EnvError, match=expected):
        make_env("toy", cameras=("top",))


@needs_gymnasium
def test_any_gymnasium_id_with_a_success_function() -> None:
    def reached(reward: float, terminated: bool, info: object) -> bool:
        return terminated and reward > 0

    env = make_gymnasium("MountainCarContinuous-v0", success=reached, max_episode_steps=5)
    steps = play(env, 0, np.ones(1, np.float32))
    assert len(steps) == 5 and steps[-1].truncated
    assert env.spec.features["observation.state"].shape == (2,)
    with pytest.raises(EnvError, match="does not say whether the task is done"):
        play(make_env("MountainCarContinuous-v0"), 0, np.ones(1, np.float32))


@needs_gymnasium
def test_an_unknown_name_is_refused_with_the_registered_names() -> None:
    with pytest.raises(EnvError, match=r"unknown environment 'NoSuchEnv-v0'.*libero_\*.*gymnasium id"):
        make_env("NoSuchEnv-v0")


def test_a_module_that_registers_is_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_robot.py").write_text(
        "import toy_env\nfrom acrlpd.envs import register_env\n"
        "register_env('mine', lambda name, **options: toy_env.make_toy('toy', **options))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env("my_robot:mine").spec.action_dim == 2
    with pytest.raises(EnvError, match=r"cannot import 'no_such_robot' .* PYTHONPATH=\. acrlpd"):
        make_env("no_such_robot:mine")
    with pytest.raises(EnvError, match=r"'\.\.robots:mine' is not of the form module:Name"):
        make_env("..robots:mine")


def make_under_another_name(name: str, **options: object) -> Env:
    return make_toy("toy-raise-1", **options)


def test_errors_have_the_name_that_the_user_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered function may know its environment by another name, and may be wrong itself."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register_env("kitchen", make_under_another_name)
    register_env("no-options", lambda name: make_toy("toy"))
    register_env("no-adapter", lambda name, **options: Toy("toy"))
    register_env("no-camera", lambda name, **options: make_toy("toy", **(options | {"cameras": ["top"]})))
    env = make_env("kitchen")
    env.reset(1)
    assert (env.name, env.spec.name) == ("kitchen", "kitchen")
    with pytest.raises(EnvError, match="environment 'kitchen', seed 1, step 2: it raised ZeroDivisionError"):
        play(env, 1, np.zeros(2, np.float32))
    for name, words in {
        "no-options": "'no-options' cannot be made: TypeError: .* unexpected keyword argument",
        "no-adapter": r"'no-adapter': the function given to register_env must return an acrlpd\.envs\.Env; found Toy",
        "no-camera": "'no-camera' cannot be made: environment 'toy' has no camera 'top'",
    }.items():
        with pytest.raises(EnvError, match=words):
            make_env(name)


@needs_gymnasium
def test_an_unknown_name_is_refused_with_the_nearest_one_as_users_type_it() -> None:
    with pytest.raises(EnvError, match=r"unknown environment 'toy_env:tox'.*did you mean 'toy_env:toy'"):
        make_env("toy_env:tox")


def test_a_missing_simulator_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogbench", None)
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    with pytest.raises(ModuleNotFoundError, match=r"needs the package 'ogbench': pip install .*\[sim\]'"):
        make_env("cube-single-play-singletask-v0")


@pytest.mark.parametrize("name", ["visual-cube-single-play-singletask-v0", "gym_aloha/AlohaTransferCube-v0"])
def test_missing_graphics_name_the_system_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "")  # monkeypatch then restores the variable after the test
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(EnvError, match=r"apt-get install libegl1 .*State-only environments.*work without EGL"):
        make_env(name)


@needs_ogbench
def test_state_only_environments_need_no_graphics() -> None:
    """A fresh process, since mujoco chooses its graphics once."""
    script = (
        "from acrlpd.envs import make_env\n"
        "env = make_env('cube-single-play-singletask-v0')\n"
        "env.reset(0)\nprint(env.step([0] * 5).reward)\nenv.render()\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, env={**os.environ, "MUJOCO_GL": "disabled"}, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "-1.0"
    assert "apt-get install libegl1" in result.stderr


def test_a_backend_chosen_by_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    choose_backend()
    assert os.environ["MUJOCO_GL"] == "osmesa"
