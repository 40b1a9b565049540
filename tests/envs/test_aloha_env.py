"""gym-aloha: joint positions without clipping, three cameras without waste, a scripted transfer."""

import numpy as np
import pytest
from sim_marks import needs_aloha, needs_egl

from acrlpd.envs import Env, EnvError, make_env
from acrlpd.envs.aloha_env import CAMERAS
from acrlpd.envs.episodes import demonstrate

TRANSFER = "gym_aloha/AlohaTransferCube-v0"
pytestmark = needs_aloha


@pytest.fixture(scope="module")
def transfer() -> Env:
    return make_env(TRANSFER, cameras=())


def test_joint_positions_are_reached_beyond_what_the_action_space_says(transfer: Env) -> None:
    transfer.reset(0)
    target = transfer.observe()["observation.state"].copy()
    target[[2, 9]] = 1.4  # the elbows
    for _ in range(60):
        transfer.step(target)
    np.testing.assert_allclose(transfer.observe()["observation.state"][[2, 9]], 1.4, atol=0.1)
    assert (transfer.spec.action_dim, transfer.spec.fps, transfer.prompt) == (14, 50, "Transfer cube")


def test_the_cube_lies_where_the_seed_says_also_with_two_environments(transfer: Env) -> None:
    other = make_env(TRANSFER, cameras=())
    places = []
    for seed in (1, 2, 1):
        transfer.reset(seed)
        other.reset(99)
        places.append(transfer.env.physics.data.qpos[16:18].copy())
    np.testing.assert_array_equal(places[0], places[2])
    assert np.abs(places[0] - places[1]).max() > 1e-3


def test_the_expert_transfers_the_cube_and_repeats(transfer: Env) -> None:
    first, again = demonstrate(transfer, 0, "expert"), demonstrate(transfer, 0, "expert")
    np.testing.assert_array_equal(first.actions, again.actions)
    np.testing.assert_array_equal(first.rewards, again.rewards)
    assert first.succeeded and first.terminated and first.rewards[-1] == 4
    assert 150 < first.length < 230
    assert demonstrate(transfer, 3, "expert").succeeded


def test_an_expert_that_reaches_beside_the_cube_fails(transfer: Env) -> None:
    outcomes = {demonstrate(transfer, seed, "mixed").succeeded for seed in (0, 1)}
    assert outcomes == {True, False}


def test_the_expert_reaches_alike_for_cubes_that_lie_close_together(transfer: Env) -> None:
    """Inverse kinematics know several poses of the arm; it must not jump between them."""
    from acrlpd.experts.aloha import Arm, right_waypoints

    transfer.reset(0)
    model, data = transfer.env.physics.model.ptr, transfer.env.physics.data.ptr
    arm = Arm(model, "right")
    x, y = np.meshgrid(np.linspace(0.0, 0.2, 6), np.linspace(0.4, 0.6, 6), indexing="ij")
    cubes = np.stack([x, y, np.full_like(x, 0.02)], axis=-1)  # every 4 cm of where the cube can lie
    plans = np.array([[arm.plan(data, right_waypoints(cube, np.zeros(2)), 1.0) for cube in row] for row in cubes])
    assert max(np.abs(np.diff(plans, axis=0)).max(), np.abs(np.diff(plans, axis=1)).max()) < 1.2  # radians


def test_the_pose_above_the_cube_does_not_give_it_away(transfer: Env) -> None:
    """Else a policy has nothing to look for on the way down: arrivals differ for one and the same cube."""
    from acrlpd.experts.aloha import TransferExpert

    transfer.reset(0)
    arrivals, grasps = [], []
    for seed in range(8):
        expert = TransferExpert(transfer.env.physics, TRANSFER, "expert", np.random.default_rng(seed))
        plan = np.array([expert.act() for _ in range(250)])
        closing = int(np.argmax(plan[60:, 13] < 0.9)) + 60
        arrivals.append(plan[closing - 38, 7])  # the waist of the right arm, on the way
        grasps.append(plan[closing, 7])
    assert np.std(arrivals) > 2 * np.std(grasps)


def test_commands_that_break_the_simulation_fail_the_episode(transfer: Env) -> None:
    rng = np.random.default_rng(0)
    transfer.reset(0)
    for _step in range(299):  # one less than the time limit
        step = transfer.step(rng.normal(0.0, 3.0, 14))
        if step.truncated:
            break
    assert step.truncated and not step.terminated and not step.success and step.reward == 0.0
    assert np.isfinite(transfer.observe()["observation.state"]).all()
    assert demonstrate(transfer, 0, "expert").succeeded, "the next episode is as if nothing had happened"


def test_insertion_has_no_expert() -> None:
    env = make_env("gym_aloha/AlohaInsertion-v0", cameras=())
    env.reset(0)
    assert env.prompt == "Insert the peg" and env.spec.qualities == ()
    with pytest.raises(EnvError, match="no scripted expert"):
        env.expert("expert", np.random.default_rng(0))


@needs_egl
def test_three_cameras_are_rendered_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert all(observation[camera].shape == (48, 64, 3) for camera in CAMERAS)
    top = observation["observation.images.top"].astype(int)
    assert (top[..., 0] - top[..., 1]).max() > 100  # the cube is red
    env.reset(0)
    env.step(action)
    for camera in CAMERAS:
        np.testing.assert_array_equal(env.observe()[camera], observation[camera])
    env.close()
