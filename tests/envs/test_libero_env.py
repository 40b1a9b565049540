"""The LIBERO adapter with a fake of the package, since LIBERO's meshes are a separate download."""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from libero_states import array_pickle, torch_file
from sim_marks import needs_gymnasium

from acrlpd.envs import EnvError, make_env
from acrlpd.envs.libero_env import axis_angle

pytestmark = needs_gymnasium

# Like LIBERO, the fake reads its config file when it is imported, has the interface of old gym, and gives images that
# are upside down.
TASKS = ["pick_up_the_bowl", "open_the_drawer"]
FAKE_PACKAGE = """
import os, yaml
from pathlib import Path

with open(Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml") as file:  # LIBERO asks if the file is missing
    PATHS = yaml.safe_load(file)

def get_libero_path(key):
    return PATHS[key]
"""
FAKE_ENVS = """
from pathlib import Path
import numpy as np

OPENED = []

class OffScreenRenderEnv:
    def __init__(self, bddl_file_name, camera_heights, camera_widths):
        OPENED.append(Path(bddl_file_name).stem)
        self.language_instruction = Path(bddl_file_name).stem.replace("_", " ")
        self.size = (camera_heights, camera_widths)

    def seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.steps, self.x, self.y = 0, self.rng.uniform(), 0.0
        return self.observation()

    def get_sim_state(self):
        return np.array([self.steps, self.x, self.y])

    def set_init_state(self, state):
        _, self.x, self.y = state
        return self.observation()

    def step(self, action):
        assert len(action) == 7
        self.steps += 1
        self.x += float(action[0])
        done = self.x > 2
        return self.observation(), float(done), done, {}

    def observation(self):
        image = np.zeros((*self.size, 3), np.uint8)
        image[0, 0] = 255
        return {
            "agentview_image": image,
            "robot0_eye_in_hand_image": image // 2,
            "robot0_eef_pos": np.array([self.x, self.steps, self.y]),
            "robot0_eef_quat": np.array([0.0, 0.0, np.sin(0.25), np.cos(0.25)]),
            "robot0_gripper_qpos": np.array([0.1, -0.1]),
        }

    def close(self):
        pass
"""


@pytest.fixture
def libero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "site" / "libero" / "libero"
    (package / "envs").mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_PACKAGE))
    (package / "envs" / "__init__.py").write_text(textwrap.dedent(FAKE_ENVS))
    tasks, states = (package / folder / "libero_spatial" for folder in ("bddl_files", "init_files"))
    tasks.mkdir(parents=True)
    states.mkdir(parents=True)
    (package / "benchmark").mkdir()
    (package / "benchmark" / "__init__.py").write_text("import torch")
    (package / "benchmark" / "libero_suite_task_map.py").write_text(f"libero_task_map = {{'libero_spatial': {TASKS}}}")
    for number, task in enumerate(TASKS):
        (tasks / f"{task}.bddl").touch()
        fixed = [[0.0, 0.1 * state, number] for state in range(3)]
        (states / f"{task}.pruned_init").write_bytes(torch_file(array_pickle(np.array(fixed))))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "config"))
    monkeypatch.setenv("MUJOCO_GL", "egl")
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


def test_observations_are_those_of_openpis_libero_data(libero: Path) -> None:
    env = make_env("libero_spatial/0", image_size=(8, 8))
    env.reset(3)
    columns = env.observe()
    assert set(columns) == {"state", "image", "wrist_image"}
    assert columns["image"][-1, -1].tolist() == [255] * 3 and columns["image"][0, 0].tolist() == [0] * 3
    np.testing.assert_allclose(columns["state"][3:], [0.0, 0.0, 0.5, 0.1, -0.1], atol=1e-6)
    assert columns["state"][1] == 10  # objects had time to settle
    assert (env.prompt, env.spec.action_column, env.spec.action_dim) == ("pick up the bowl", "actions", 7)
    for _ in range(2):
        step = env.step(np.ones(7))
        assert not step.done
    step = env.step(np.ones(7))
    assert step.terminated and step.success and step.reward == 1.0


def episodes(name: str, seeds: Iterable[int]) -> list[tuple[str, float, float]]:
    """Prompt, and the two numbers of the initial state: which state it is, and of which task."""
    env, found = make_env(name, image_size=(8, 8)), []
    for seed in seeds:
        env.reset(seed)
        x, _, y = env.observe()["state"][:3].tolist()
        found.append((env.prompt, round(x / 0.1), round(y)))
    return found


def test_a_suite_plays_each_state_of_each_task_once(libero: Path) -> None:
    found = episodes("libero_spatial", range(6))
    assert found == [(task.replace("_", " "), state, number) for state in range(3) for number, task in enumerate(TASKS)]
    assert episodes("libero_spatial", [6, 7]) == found[:2]


def test_one_task_has_the_number_of_the_benchmark_and_its_states_by_seed(libero: Path) -> None:
    assert [found[1:] for found in episodes("libero_spatial/1", [0, 1, 2, 3, 50])] == [(i, 1) for i in (0, 1, 2, 0, 2)]
    assert episodes("libero_spatial/0", [0])[0][0] == "pick up the bowl"  # not the first in the alphabet


def test_states_of_another_simulator_are_refused(libero: Path) -> None:
    path = libero / "init_files" / "libero_spatial" / f"{TASKS[0]}.pruned_init"
    path.write_bytes(torch_file(array_pickle(np.zeros((3, 5)))))
    with pytest.raises(EnvError, match=r"have 5 numbers, the simulator has 3\. Install the versions"):
        make_env("libero_spatial/0", image_size=(8, 8))
    path.unlink()
    with pytest.raises(EnvError, match=r"pruned_init does not exist: check the paths"):
        make_env("libero_spatial/0", image_size=(8, 8))


def test_the_question_about_paths_is_answered_beforehand(libero: Path, tmp_path: Path) -> None:
    make_env("libero_spatial/0", image_size=(8, 8))
    assert str(libero / "bddl_files") in (tmp_path / "config" / "config.yaml").read_text()


def test_unknown_suites_and_tasks_are_refused(libero: Path) -> None:
    with pytest.raises(EnvError, match="suites are libero_spatial"):
        make_env("libero_kitchen")
    with pytest.raises(EnvError, match="libero_spatial has 2 tasks"):
        make_env("libero_spatial/2")


def test_a_missing_package_points_to_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"installed by hand: see docs/environments\.md"):
        make_env("libero_spatial")


def test_axis_angle() -> None:
    np.testing.assert_array_equal(axis_angle(np.array([0.0, 0.0, 0.0, 1.0])), np.zeros(3))
    half_turn = axis_angle(np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(half_turn, [np.pi, 0.0, 0.0])
