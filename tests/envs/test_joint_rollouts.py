"""Rollouts of several runs at once: every run lives what it would live alone, and the policy is asked once for all."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from acrlpd.envs import Chunks, EnvError, EnvPool, Plan, Rollout, joint_rollouts, rollouts
from acrlpd.execution.base import ChunkPolicy, Columns
from acrlpd.execution.open_loop import OpenLoop

# Members of different length: one of them rests at the end while another still plays.
PLANS = [Plan(range(5), policy_seed=7), Plan(range(20, 29), policy_seed=8), Plan([3], policy_seed=7)]
EXECUTION = OpenLoop(3)


def policy_of(member: int) -> ChunkPolicy:
    """The policy of one member, which treats every row by itself."""

    def act(observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        actions = [np.random.default_rng([seed, member]).uniform(-0.2, 1.0, (4, 2)) for seed in seeds]
        return Chunks(np.array(actions, np.float32), {"q": observations["observation.state"][:, 0] + member})

    return act


class JointPolicy:
    """The policies of all members in one call. Its rows are ordered by member."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.num_rows: set[int] = set()

    def __call__(self, observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        self.num_rows.add(len(seeds))
        chunks = []
        for member, rows in enumerate(np.split(np.arange(len(seeds)), self.num_members)):
            part = slice(rows[0], rows[-1] + 1)
            columns = {name: values[part] for name, values in observations.items()}
            chunks.append(policy_of(member)(columns, prompts[part], seeds[part]))
        return Chunks(
            np.concatenate([c.actions for c in chunks]), {"q": np.concatenate([c.values["q"] for c in chunks])}
        )


def of_member(played: Iterable[tuple[int, Rollout]], member: int) -> list[Rollout]:
    return [rollout for i, rollout in played if i == member]


def alone(member: int, num_envs: int) -> list[Rollout]:
    plan = PLANS[member]
    with EnvPool("toy", num_envs, num_workers=0) as envs:
        options = {"execution": EXECUTION, "policy_seed": plan.policy_seed, "record": True, "films": 1}
        return list(rollouts(envs, policy_of(member), plan.seeds, **options))


def assert_equal(found: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    """All fields to the last bit, in the same order."""
    assert [rollout.seed for rollout in found] == [rollout.seed for rollout in expected]
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_equal(dataclasses.asdict(mine), dataclasses.asdict(other))


@pytest.mark.parametrize("num_envs", [1, 2, 4])
def test_every_member_plays_what_it_plays_alone(num_envs: int) -> None:
    policy = JointPolicy(3)
    with EnvPool("toy", 3 * num_envs, num_workers=0) as envs:
        played = list(joint_rollouts(envs, policy, PLANS, execution=EXECUTION, record=True, films=1))
    for member in range(3):
        assert_equal(of_member(played, member), alone(member, num_envs))
    assert policy.num_rows == {3 * max(1, num_envs // 2)}


def test_a_member_without_a_plan_rests() -> None:
    policy = JointPolicy(3)
    with EnvPool("toy", 6, num_workers=0) as envs:
        plans = [None, PLANS[1], None]
        played = list(joint_rollouts(envs, policy, plans, execution=EXECUTION, record=True, films=1))
        assert list(joint_rollouts(envs, policy, [None] * 3, execution=EXECUTION)) == []
    assert {member for member, _ in played} == {1}
    assert_equal(of_member(played, 1), alone(1, 2))
    assert policy.num_rows == {3}


@pytest.mark.parametrize("fault", ["raise-22", "raise-22-once"])
def test_a_failure_costs_the_member_that_it_befalls_and_nobody_else(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAULTS", str(tmp_path))
    with EnvPool(f"toy-{fault}", 6, num_workers=0) as envs:
        played = list(joint_rollouts(envs, JointPolicy(3), PLANS, execution=EXECUTION, record=True, films=1))
        assert {failure.slot for failure in envs.failures} <= {2, 3}
    for member in (0, 2):
        assert_equal(of_member(played, member), alone(member, 2))
    lost = set() if fault.endswith("once") else {22}
    found = sorted(of_member(played, 1), key=lambda rollout: rollout.seed)
    expected = sorted(alone(1, 2), key=lambda rollout: rollout.seed)
    assert_equal(found, [rollout for rollout in expected if rollout.seed not in lost])


def test_a_pool_that_cannot_be_shared_equally_is_refused() -> None:
    words = r"3 runs share a pool in equal parts, but the pool of 'toy' has 4 environments"
    with EnvPool("toy", 4, num_workers=0) as envs, pytest.raises(EnvError, match=words):
        joint_rollouts(envs, JointPolicy(3), PLANS, execution=EXECUTION)
