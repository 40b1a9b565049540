"""gym-aloha: joint positions without clipping, and cameras that are rendered only when they are needed."""

import numpy as np
import pytest
from sim_marks import needs_aloha, needs_egl

from acrlpd.envs import Env, make_env

TRANSFER = "gym_aloha/AlohaTransferCube-v0"
pytestmark = needs_aloha


@pytest.fixture(scope="module")
def transfer() -> Env:
    return make_env(TRANSFER, cameras=())


def test_joint_positions_beyond_the_bounds_of_the_action_space_are_reached(transfer: Env) -> None:
    transfer.reset(0)
    target = transfer.observe()["observation.state"].copy()
    target[[2, 9]] = 1.4  # the elbows
    for _ in range(60):
        transfer.step(target)
    np.testing.assert_allclose(transfer.observe()["observation.state"][[2, 9]], 1.4, atol=0.1)
    assert (transfer.spec.action_dim, transfer.spec.fps, transfer.prompt) == (14, 50, "Transfer cube")


def test_the_seed_places_the_cube_also_with_two_environments(transfer: Env) -> None:
    other = make_env(TRANSFER, cameras=())
    places = []
    for seed in (1, 2, 1):
        transfer.reset(seed)
        other.reset(99)
        places.append(transfer.env.physics.data.qpos[16:18].copy())
    np.testing.assert_array_equal(places[0], places[2])
    assert np.abs(places[0] - places[1]).max() > 1e-3


def test_insertion_is_another_task() -> None:
    assert make_env("gym_aloha/AlohaInsertion-v0", cameras=()).prompt == "Insert the peg"


@needs_egl
def test_three_cameras_are_rendered_only_for_an_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(TRANSFER, image_size=(48, 64))
    rendered = []
    render = env.env.render_camera
    monkeypatch.setattr(env.env, "render_camera", lambda camera: rendered.append(camera) or render(camera))
    env.reset(0)
    action = env.env._env.task.get_qpos(env.env.physics)
    env.step(action)
    assert not rendered
    observation = env.observe()
    assert rendered == ["top", "left_wrist", "right_wrist"]
    cameras = env.spec.cameras
    assert cameras == tuple(f"observation.images.{camera}" for camera in rendered)
    assert all(observation[camera].shape == (48, 64, 3) for camera in cameras)
    top = observation["observation.images.top"].astype(int)
    assert (top[..., 0] - top[..., 1]).max() > 100  # the cube is red
    env.reset(0)
    env.step(action)
    for camera in cameras:
        np.testing.assert_array_equal(env.observe()[camera], observation[camera])
    env.close()
