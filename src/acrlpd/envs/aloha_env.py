"""gym-aloha: two simulated ViperX arms, 14 joint positions, three cameras.

The package itself renders three 480x640 images with shadows and multisampling at every step. Here a step renders
nothing, and an observation renders only the wanted cameras, in the wanted size and with fast settings.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from acrlpd.envs.env import STATE, Columns, Env
from acrlpd.envs.simulators import choose_backend, rendering_error, require, require_rendering, use_fast_settings

# Cameras of the simulator; the column of each is observation.images.<camera>.
_CAMERAS = ("top", "left_wrist", "right_wrist")
_TASKS = {
    "gym_aloha/AlohaTransferCube-v0": ("transfer_cube", "Transfer cube"),
    "gym_aloha/AlohaInsertion-v0": ("insertion", "Insert the peg"),
}
MAX_EPISODE_STEPS = 300
_FILM_SIZE = (240, 320)


def make_aloha(
    name: str, *, cameras: Sequence[str] | None, image_size: tuple[int, int], max_episode_steps: int | None
) -> Env:
    """With `cameras=()` observations are joint positions alone, which needs no graphics."""
    choose_backend()
    if cameras is None or cameras:
        require_rendering(name)
    require("gym_aloha", env=name)
    task, prompt = _TASKS[name]
    return AlohaEnv(
        _simulator(name, task, image_size),
        name=name,
        prompt=prompt,
        fps=50,
        cameras=cameras,
        max_episode_steps=min(max_episode_steps or MAX_EPISODE_STEPS, MAX_EPISODE_STEPS),
        # The action space says [-1, 1], but actions are joint positions in radians.
        clip_actions=False,
        robot_type="aloha",
    )


class AlohaEnv(Env):
    """Observes joint positions and the wanted cameras."""

    def observation_columns(self, raw: np.ndarray) -> Columns:
        columns = {f"observation.images.{camera}": camera for camera in _CAMERAS}
        images = {column: self.env.render_camera(camera) for column, camera in columns.items() if self.wants(column)}
        return {STATE: raw, **images}


def _simulator(name: str, task: str, image_size: tuple[int, int]) -> Any:
    import mujoco
    from dm_control.rl.control import PhysicsError
    from gym_aloha.env import AlohaEnv as GymAloha

    class Simulator(GymAloha):
        def __init__(self) -> None:
            super().__init__(task, obs_type="pixels_agent_pos")
            self.physics = self._env.physics
            simulated = self._env.task
            simulated.get_observation = lambda physics: {"qpos": simulated.get_qpos(physics)}
            use_fast_settings(self.physics.model.ptr)
            self._renderers: dict[tuple[int, int], Any] = {}

        def _format_raw_obs(self, raw_obs: dict[str, np.ndarray]) -> np.ndarray:
            return raw_obs["qpos"].astype(np.float32)

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            """An action that makes the simulation diverge ends the episode as a failure, in the last valid pose."""
            before = self.physics.get_state()
            try:
                return super().step(action)
            except PhysicsError:
                with self.physics.reset_context():
                    self.physics.set_state(before)
                raw = self._format_raw_obs({"qpos": self._env.task.get_qpos(self.physics)})
                return raw, 0.0, False, True, {"is_success": False}

        def render_camera(self, camera: str, size: tuple[int, int] = image_size) -> np.ndarray:
            if size not in self._renderers:
                require_rendering(name)
                try:
                    self._renderers[size] = mujoco.Renderer(self.physics.model.ptr, *size)
                except Exception as error:  # PyOpenGL and mujoco raise many kinds of errors
                    raise rendering_error(name, error) from error
            self._renderers[size].update_scene(self.physics.data.ptr, camera)
            return self._renderers[size].render()

        def render(self) -> np.ndarray:
            return self.render_camera("angle", _FILM_SIZE)

        def close(self) -> None:
            for renderer in self._renderers.values():
                renderer.close()
            self._renderers.clear()

    return Simulator()
