"""gym-aloha: two simulated ViperX arms, 14 joint positions, three cameras.

The package renders three 480x640 images at every step, whatever is asked for, with shadows and
multisampling. Here a step renders nothing, an observation renders the cameras that are wanted at the size
that is wanted, and both are fast.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from acrlpd.envs.env import STATE, Columns, Env, Expert
from acrlpd.envs.errors import EnvError, require
from acrlpd.envs.rendering import choose_backend, rendering_error, require_rendering, use_fast_settings

# Camera column -> camera of the simulator.
CAMERAS = {
    "observation.images.top": "top",
    "observation.images.left_wrist": "left_wrist",
    "observation.images.right_wrist": "right_wrist",
}
_TASKS = {
    "gym_aloha/AlohaTransferCube-v0": ("transfer_cube", "Transfer cube"),
    "gym_aloha/AlohaInsertion-v0": ("insertion", "Insert the peg"),
}
MAX_EPISODE_STEPS = 300
_FILM_SIZE = (240, 320)


def make_aloha(
    name: str,
    *,
    cameras: Sequence[str] | None = None,
    image_size: tuple[int, int],
    max_episode_steps: int | None = None,
) -> Env:
    """`cameras=()` gives joint positions alone and needs no graphics."""
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
    """Joint positions and the cameras that are wanted."""

    @property
    def qualities(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("expert", "noisy", "mixed") if self.env.task == "transfer_cube" else ()

    def observation_columns(self, raw: np.ndarray) -> Columns:
        images = {column: self.env.render_camera(camera) for column, camera in CAMERAS.items() if self.wants(column)}
        return {STATE: raw, **images}

    def expert(self, quality: str, rng: np.random.Generator) -> Expert:
        if not self.qualities:
            raise EnvError(f"environment {self.name!r} has no scripted expert; AlohaTransferCube-v0 has one")
        from acrlpd.experts.aloha import TransferExpert

        return TransferExpert(self.env.physics, self.name, quality, rng)


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
            """Commands that make the simulation diverge end the episode, failed, in the last pose that was valid."""
            before = self.physics.get_state()
            try:
                return super().step(action)
            except PhysicsError:
                with self.physics.reset_context():
                    self.physics.set_state(before)
                raw = self._format_raw_obs({"qpos": self._env.task.get_qpos(self.physics)})
                return raw, 0.0, False, True, {"is_success": False}

        def render_camera(self, camera: str, size: tuple[int, int] = image_size) -> np.ndarray:
            renderer = self._renderers.get(size)
            if renderer is None:
                renderer = self._renderers[size] = self._make_renderer(size)
            renderer.update_scene(self.physics.data.ptr, camera)
            return renderer.render()

        def _make_renderer(self, size: tuple[int, int]) -> Any:
            require_rendering(name)
            try:
                return mujoco.Renderer(self.physics.model.ptr, *size)
            except Exception as error:  # PyOpenGL and mujoco raise many kinds
                raise rendering_error(name, f"{type(error).__name__}: {error}") from error

        def render(self) -> np.ndarray:
            return self.render_camera("angle", _FILM_SIZE)

        def close(self) -> None:
            for renderer in self._renderers.values():
                renderer.close()
            self._renderers.clear()

    return Simulator()
