"""The LIBERO adapter with a fake of the package, since LIBERO's meshes are a separate download."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sim_marks import needs_gymnasium

from acrlpd.envs import EnvError, make_env
from acrlpd.envs.libero_env import axis_angle

pytestmark = needs_gymnasium

# Like LIBERO, the fake reads its config file when it is imported, has the interface of old gym, and gives images that
# are upside down.
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
        self.steps, self.x = 0, self.rng.uniform()
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
            "robot0_eef_pos": np.array([self.x, self.steps, 0.0]),
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
    tasks = package / "bddl_files" / "libero_spatial"
    tasks.mkdir(parents=True)
    for task in ("open_the_drawer", "pick_up_the_bowl"):
        (tasks / f"{task}.bddl").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "config"))
    monkeypatch.setenv("MUJOCO_GL", "egl")
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


def test_observations_are_those_of_openpis_libero_data(libero: Path) -> None:
    env = make_env("libero_spatial/1", image_size=(8, 8))
    env.reset(3)
    columns = env.observe()
    assert set(columns) == {"state", "image", "wrist_image"}
    assert columns["image"][-1, -1].tolist() == [255] * 3 and columns["image"][0, 0].tolist() == [0] * 3
    np.testing.assert_allclose(columns["state"][3:], [0.0, 0.0, 0.5, 0.1, -0.1], atol=1e-6)
    assert columns["state"][1] == 10  # objects had time to settle
    assert (env.prompt, env.spec.action_column, env.spec.action_dim) == ("pick up the bowl", "actions", 7)
    step = env.step(np.ones(7))
    assert not step.done
    step = env.step(np.ones(7))
    assert step.terminated and step.success and step.reward == 1.0


def test_a_suite_plays_its_tasks_by_seed(libero: Path) -> None:
    env = make_env("libero_spatial", image_size=(8, 8))
    prompts = []
    for seed in range(4):
        env.reset(seed)
        prompts.append(env.prompt)
    assert prompts == ["open the drawer", "pick up the bowl"] * 2


def test_the_question_about_paths_is_answered_beforehand(libero: Path, tmp_path: Path) -> None:
    make_env("libero_spatial/0", image_size=(8, 8))
    assert str(libero / "bddl_files") in (tmp_path / "config" / "config.yaml").read_text()


def test_unknown_suites_and_tasks_are_refused(libero: Path) -> None:
    with pytest.raises(EnvError, match="suites are libero_spatial"):
        make_env("libero_kitchen")
    with pytest.raises(EnvError, match="holds 2 tasks"):
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
