"""OGBench manipulation: cubes, scene and puzzle with a UR5e arm, from state or from pixels.

These environments differ from the benchmark's own single-task environments in timing only. Reward, success and the
end of an episode belong to the action that caused them instead of the action after it, because the row of a dataset
holds an action and its result.
"""

import copy
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from acrlpd.envs.env import STATE, Columns, Env, EnvError
from acrlpd.envs.registry import IMAGE_SIZE
from acrlpd.envs.simulators import choose_backend, rendering_error, require, require_rendering, use_fast_settings

RAW_STATE = "observation.raw_state"
CAMERA = "observation.images.front"
_PROMPTS = {"cube": "move the cube", "scene": "rearrange the scene", "puzzle": "solve the puzzle"}
_NAME = re.compile(
    r"(?P<visual>visual-)?(?P<kind>cube|scene|puzzle)(?P<size>-(?!play|noisy|singletask)\w+)?"
    r"(-(play|noisy))?-singletask(?P<task>-task\d)?-v0"
)


def make_ogbench(
    name: str, *, cameras: Sequence[str] | None, image_size: tuple[int, int], max_episode_steps: int | None
) -> Env:
    """An environment by OGBench's own name: [visual-]cube-single[-play]-singletask[-task1]-v0."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise EnvError(
            f"unknown OGBench environment {name!r}; expected a single-task name such as "
            "cube-single-play-singletask-v0, visual-scene-play-singletask-task3-v0 or puzzle-3x3-play-singletask-v0"
        )
    choose_backend()
    if match["visual"]:
        require_rendering(name)
    require("ogbench", env=name)
    gymnasium = require("gymnasium", env=name)
    size, task = match["size"] or "", match["task"] or ""
    try:
        spec = gymnasium.spec(f"{match['visual'] or ''}{match['kind']}{size}-singletask{task}-v0")
    except gymnasium.error.Error as error:
        raise EnvError(f"unknown OGBench environment {name!r}: {error}") from error
    env = _template(name, match["kind"], spec.id, image_size).twin()
    return OGBenchEnv(
        env,
        name=name,
        prompt=_prompt(match["kind"], env, task),
        fps=20,
        cameras=cameras,
        max_episode_steps=min(spec.max_episode_steps, max_episode_steps or spec.max_episode_steps),
        robot_type="ur5e",
    )


class OGBenchEnv(Env):
    """Observes features of the cubes or the raw state, beside the raw state; or proprioception and a camera.

    The raw state has one name in all environments, which is its name in OGBench's play datasets too.
    """

    def observation_columns(self, raw: np.ndarray) -> Columns:
        if self.env.visual:
            # The state of the arm without the objects: joints (6), effector and its yaw (5), gripper (2).
            columns = {STATE: np.concatenate([raw[:6], raw[12:19]])}
            return columns | ({CAMERA: self.env.render()} if self.wants(CAMERA) else {})
        if self.env.kind == "cube":
            return {STATE: cube_features(raw), RAW_STATE: raw}
        return {STATE: raw, RAW_STATE: raw}


def cube_features(raw: np.ndarray) -> np.ndarray:
    """Features from which grasping is easy to learn: 7, and 13 per cube.

    With OGBench's raw state the network has to learn to subtract positions and angles. The features are the effector
    (position, yaw), the gripper (opening, contact), and for every cube its position and yaw, its position relative to
    the effector at two scales, and its yaw relative to the effector. A quarter turn of a cube changes nothing, so the
    last feature ignores quarter turns. Positions are in units of 10 cm, as in OGBench.
    """
    effector, effector_yaw, gripper = raw[12:15], raw[15] + 1j * raw[16], raw[17:19]
    features: list[Any] = [effector, [effector_yaw.real, effector_yaw.imag], gripper]
    for cube in raw[19:].reshape(-1, 9):
        position, yaw = cube[:3], cube[7] + 1j * cube[8]
        offset = position - effector
        turned = (yaw * effector_yaw.conjugate()) ** 4  # the same for all quarter turns
        features += [position, [yaw.real, yaw.imag], offset, np.tanh(3 * offset), [turned.real, turned.imag]]
    return np.concatenate(features).astype(np.float32)


def _prompt(kind: str, env: Any, task: str) -> str:
    prompt = _PROMPTS[kind]
    if kind == "cube" and env._num_cubes > 1:
        prompt += "s"
    if not task:
        return prompt
    words = env.task_infos[int(task[-1]) - 1]["task_name"].partition("_")[2]
    return f"{prompt}: {words.replace('_', ' ')}"


def make_play_simulator(env: str, kind: str) -> Any:
    """A simulator as OGBench records play with it: random scenes, no task, and targets that whoever records sets."""
    choose_backend()
    require("ogbench", env=env)
    return _template(env, kind, f"{env}-v0", IMAGE_SIZE, mode="data_collection", terminate_at_goal=False).twin()


@functools.lru_cache(maxsize=4)
def _template(name: str, kind: str, env_id: str, image_size: tuple[int, int], **settings: Any) -> Any:
    """A simulator from which twins are made: building a simulator takes a second, making a twin milliseconds."""
    gymnasium = require("gymnasium", env=name)
    spec = gymnasium.spec(env_id)
    create = _simulator_class(gymnasium.envs.registration.load_env_creator(spec.entry_point))
    height, width = image_size
    options = {**spec.kwargs, "height": height, "width": width, **settings}
    template = create(name, kind, **options)
    template.reset(seed=0)
    return template


def _simulator_class(base: Any) -> type:
    """A subclass of the simulator with reproducible resets, which computes and renders only what is used."""

    class Simulator(base):
        def __init__(self, name: str, kind: str, **options: Any) -> None:
            self.kind = kind
            self._name = name
            self._ob_info: dict[str, Any] | None = None
            self._caches = False
            super().__init__(**options)
            self._ob_type: str
            self.visual = self._ob_type == "pixels"

        def twin(self) -> "Simulator":
            """An independent copy that shares the parts that never change: the parsed model and the names."""
            import mujoco
            from ogbench.manipspace.controllers import DiffIKController

            twin = copy.copy(self)
            for name, value in list(vars(self).items()):
                if isinstance(value, np.ndarray):
                    setattr(twin, name, value.copy())
            del twin.action_space
            twin._model = copy.copy(self._model)
            twin._data = mujoco.MjData(twin._model)
            twin._ik = DiffIKController(model=self._ik._model, sites=["attachment_site"])
            twin._scene_option, twin._camera = mujoco.MjvOption(), mujoco.MjvCamera()
            twin._ob_info = None
            return twin

        @functools.cached_property
        def action_space(self) -> Any:
            """One space with a seed, since resets sample actions; OGBench makes an unseeded space at every use."""
            from gymnasium.spaces import Box

            return Box(-np.ones(5, np.float32), np.ones(5, np.float32))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self.action_space.seed(seed)
            return super().reset(seed=seed, options=options)

        def initialize_episode(self) -> None:
            self._caches = False
            super().initialize_episode()
            self._caches, self._ob_info = True, None

        def set_new_target(self, return_info: bool = True, p_stack: float = 0.5) -> Any:
            self._ob_info = None  # the target is part of it
            return super().set_new_target(return_info, p_stack)

        def post_step(self) -> None:
            self._ob_info = None
            super().post_step()

        def compute_ob_info(self) -> dict[str, Any]:
            """Computes once per step instead of three times: the state does not change in between."""
            if not self._caches:
                return super().compute_ob_info()
            if self._ob_info is None:
                self._ob_info = super().compute_ob_info()
            return self._ob_info

        def compute_observation(self) -> np.ndarray:
            """The state, also where the environment has images: `OGBenchEnv` renders them in `observe`."""
            kind, self._ob_type = self._ob_type, "states"
            try:
                return super().compute_observation()
            finally:
                self._ob_type = kind

        # OGBench puts the whole state into every info; `OGBenchEnv` does not read it.
        def get_reset_info(self) -> dict[str, Any]:
            return {}

        def get_step_info(self) -> dict[str, Any]:
            return {}

        def _initialize_renderer(self) -> None:
            require_rendering(self._name)
            use_fast_settings(self._model)
            try:
                super()._initialize_renderer()
            except Exception as error:  # PyOpenGL and mujoco raise many kinds of errors
                raise rendering_error(self._name, error) from error

    return Simulator
