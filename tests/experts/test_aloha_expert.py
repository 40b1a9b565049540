"""The scripted cube transfer succeeds, repeats, fails on purpose, and can be imitated."""

import numpy as np
import pytest
from sim_marks import needs_aloha

from acrlpd.envs import Env, EnvError, Rollout, make_env
from acrlpd.experts.aloha import Arm, TransferExpert, right_waypoints
from acrlpd.experts.expert import demonstrate, find_expert

TRANSFER = "gym_aloha/AlohaTransferCube-v0"
pytestmark = needs_aloha


@pytest.fixture(scope="module")
def transfer() -> Env:
    return make_env(TRANSFER, cameras=())


def play(env: Env, seed: int, quality: str) -> Rollout:
    return demonstrate(env, TransferExpert, seed, quality)


def test_the_expert_transfers_the_cube_and_repeats(transfer: Env) -> None:
    first, again = play(transfer, 0, "expert"), play(transfer, 0, "expert")
    np.testing.assert_array_equal(first.actions, again.actions)
    np.testing.assert_array_equal(first.rewards, again.rewards)
    assert first.succeeded and first.terminated and first.rewards[-1] == 4
    assert 150 < first.length < 230
    assert play(transfer, 3, "expert").succeeded


def test_an_expert_that_reaches_beside_the_cube_fails(transfer: Env) -> None:
    outcomes = {play(transfer, seed, "mixed").succeeded for seed in (0, 1)}
    assert outcomes == {True, False}


def test_detours_succeed_late_and_quick_episodes_fail_at_the_handover(transfer: Env) -> None:
    """A filter keeps the detours; the quick beginning is in the failures, which were right until late."""
    rollouts = [play(transfer, seed, "detours") for seed in range(6)]
    successes = [rollout for rollout in rollouts if rollout.succeeded]
    failures = [rollout for rollout in rollouts if not rollout.succeeded]
    assert successes and failures
    assert all(rollout.length > 210 for rollout in successes)  # the limit of the preset aloha_sim_detours
    for rollout in failures:
        assert rollout.rewards.max() == 2, "the right hand lifts the cube, and the left hand never touches it"
        assert np.argmax(rollout.rewards == 2) < 140, "the right hand takes no detour"


def test_the_expert_reaches_alike_for_cubes_that_lie_close_together(transfer: Env) -> None:
    """Several poses of the arm reach a cube; the expert must not jump between them."""
    transfer.reset(0)
    model, data = transfer.env.physics.model.ptr, transfer.env.physics.data.ptr
    arm = Arm(model, "right")
    x, y = np.meshgrid(np.linspace(0.0, 0.2, 6), np.linspace(0.4, 0.6, 6), indexing="ij")
    cubes = np.stack([x, y, np.full_like(x, 0.02)], axis=-1)  # every 4 cm of the area in which the cube can lie
    plans = np.array([[arm.plan(data, right_waypoints(cube, np.zeros(2)), 1.0) for cube in row] for row in cubes])
    assert max(np.abs(np.diff(plans, axis=0)).max(), np.abs(np.diff(plans, axis=1)).max()) < 1.2  # radians


def test_the_pose_above_the_cube_does_not_show_where_the_cube_lies(transfer: Env) -> None:
    """The arm arrives above the same cube in different poses, so that a policy has to look at the cube."""
    transfer.reset(0)
    arrivals, grasps = [], []
    for seed in range(8):
        expert = TransferExpert(transfer, "expert", np.random.default_rng(seed))
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
    assert play(transfer, 0, "expert").succeeded, "the next episode is as if nothing had happened"


def test_transfer_has_an_expert_and_insertion_has_none() -> None:
    assert find_expert(TRANSFER, ("expert", "noisy", "mixed", "detours")) is TransferExpert
    with pytest.raises(EnvError, match=r"'gym_aloha/AlohaInsertion-v0' has no scripted expert.*AlohaTransferCube-v0"):
        find_expert("gym_aloha/AlohaInsertion-v0")
