"""LIBERO task suites, with observations as in openpi's LIBERO examples.

LIBERO is installed by hand (docs/environments.md), and its meshes and textures are a separate download. Tasks have the
numbers of LIBERO's benchmark, and episodes start from its fixed initial states. "libero_spatial/3" always plays task 3,
from state `seed % states`. "libero_spatial" plays task `seed % tasks`, from state `seed // tasks % states`: as many
seeds as there are tasks and states play each state of each task once.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from acrlpd.envs.env import Columns, Env, EnvError
from acrlpd.envs.libero_files import read_initial_states, read_task_names
from acrlpd.envs.simulators import choose_backend, require, require_rendering

STATE, IMAGE, WRIST_IMAGE = "state", "image", "wrist_image"
# Steps in which the suite's longest demonstration fits; openpi evaluates with the same numbers.
_MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
_SETTLE_STEPS = 10  # in which objects fall onto the table
_DO_NOTHING = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def make_libero(
    name: str, *, cameras: Sequence[str] | None, image_size: tuple[int, int], max_episode_steps: int | None
) -> Env:
    """A suite ("libero_spatial") or one of its tasks ("libero_spatial/3")."""
    suite, _, task = name.partition("/")
    if suite not in _MAX_STEPS or (task and not task.isdecimal()):
        raise EnvError(f"unknown LIBERO environment {name!r}; suites are {', '.join(_MAX_STEPS)}, tasks suite/0")
    choose_backend()
    require_rendering(name)
    _write_config(name)
    return LiberoEnv(
        _Simulator(name, suite, int(task) if task else None, image_size),
        name=name,
        prompt="",
        fps=20,
        cameras=cameras,
        max_episode_steps=min(_MAX_STEPS[suite], max_episode_steps or _MAX_STEPS[suite]),
        robot_type="panda",
    )


class LiberoEnv(Env):
    """Has the columns of physical-intelligence/libero; the prompt is the task of the episode."""

    action_column = "actions"

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.prompt = self.env.language

    def observation_columns(self, raw: dict[str, np.ndarray]) -> Columns:
        position, quaternion = raw["robot0_eef_pos"], raw["robot0_eef_quat"]
        state = np.concatenate([position, axis_angle(quaternion), raw["robot0_gripper_qpos"]])
        image, wrist_image = raw["agentview_image"], raw["robot0_eye_in_hand_image"]
        return {STATE: state, IMAGE: _upright(image), WRIST_IMAGE: _upright(wrist_image)}


class _Simulator:
    """LIBERO's environment behind gymnasium's interface; one task is open at a time."""

    def __init__(self, name: str, suite: str, task: int | None, image_size: tuple[int, int]) -> None:
        libero = importlib.import_module("libero.libero")
        self._tasks = read_task_names(Path(libero.__path__[0]), suite)
        self._bddl_files, self._state_files = (
            Path(libero.get_libero_path(key)) / suite for key in ("bddl_files", "init_states")
        )
        if task is not None and task >= len(self._tasks):
            raise EnvError(f"environment {name!r}: {suite} has {len(self._tasks)} tasks, {suite}/0 is the first")
        spaces = require("gymnasium.spaces", env=name)
        self.action_space = spaces.Box(-np.ones(7, np.float32), np.ones(7, np.float32))
        self._fixed_task = task
        self._size = image_size
        self._env: Any = None
        self._open_task: int | None = None
        self._states = np.empty((0, 0))  # the initial states [n, d] of the open task
        self._last: Any = None

    @property
    def language(self) -> str:
        return str(self._env.language_instruction)

    def reset(self, *, seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        episode, task = (seed, self._fixed_task) if self._fixed_task is not None else divmod(seed, len(self._tasks))
        if task != self._open_task:
            self._open(task)
        self._env.seed(seed)
        self._env.reset()
        state, found = self._states[episode % len(self._states)], len(self._env.get_sim_state())
        if len(state) != found:
            raise EnvError(
                f"LIBERO's task {self._tasks[task]!r}: its initial states have {len(state)} numbers, the simulator has "
                f"{found}. Install the versions of LIBERO and robosuite that docs/environments.md names"
            )
        self._last = self._env.set_init_state(state)
        for _ in range(_SETTLE_STEPS):
            self._last, *_ = self._env.step(_DO_NOTHING)
        return self._last, {}

    def _open(self, task: int) -> None:
        self.close()
        height, width = self._size
        path = self._bddl_files / f"{self._tasks[task]}.bddl"
        if not path.is_file():
            raise EnvError(f"{path} does not exist: check the paths in LIBERO's config.yaml")
        self._states = read_initial_states(self._state_files / f"{self._tasks[task]}.pruned_init")
        self._env = importlib.import_module("libero.libero.envs").OffScreenRenderEnv(
            bddl_file_name=str(path), camera_heights=height, camera_widths=width
        )
        self._open_task = task

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._last, reward, done, _ = self._env.step(action)
        return self._last, float(reward), bool(done), False, {"success": bool(done)}

    def render(self) -> np.ndarray:
        return _upright(self._last["agentview_image"])

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = self._open_task = None


def _upright(image: np.ndarray) -> np.ndarray:
    """The simulator's images are upside down and mirrored."""
    return np.ascontiguousarray(image[::-1, ::-1])


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """A rotation, given as a quaternion (x, y, z, w), as axis times angle."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    norm = math.sqrt(1.0 - w * w)
    if norm < 1e-8:
        return np.zeros(3)
    return np.asarray(quaternion[:3]) * (2.0 * math.acos(w) / norm)


def _write_config(name: str) -> None:
    """Writes the file in which LIBERO looks for its paths; without the file LIBERO asks for them on the terminal."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"environment {name!r} needs LIBERO, which is installed by hand: see docs/environments.md", name="libero"
        )
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH") or Path.home() / ".libero")
    path = folder / "config.yaml"
    if path.is_file():
        return
    root = Path(next(iter(spec.submodule_search_locations))) / "libero"
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({key: str(value) for key, value in paths.items()}))
