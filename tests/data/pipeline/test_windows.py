"""Windows against a reference that walks through the steps one by one."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acrlpd.config import RewardConfig
from acrlpd.data.pipeline.batches import make_windows
from acrlpd.data.pipeline.rewards import compute_rewards
from acrlpd.data.pipeline.sampling import WindowSampler
from acrlpd.data.sources.source import ColumnTable


@dataclasses.dataclass
class PlainEpisode:
    rewards: list[float]
    success: list[bool]


def reference_window(episode, t, horizon_length, action_horizon, *, play):
    """What a window must hold, step by step, straight from the definition of the batch.

    In play, every success but that of the last step is a terminal, and the recording goes on after it.
    """
    length = len(episode.rewards)
    first_success = episode.success.index(True) if any(episode.success) else None
    window = {"valid": [], "rewards": [], "masks": [], "terminals": [], "action_steps": []}
    for i in range(action_horizon):
        window["valid"].append(1.0 if t + i < length else 0.0)
        window["action_steps"].append(t + i if t + i < length else length - 1)
    starts_after_end = not play and first_success is not None and t > first_success
    over = starts_after_end
    for i in range(horizon_length):
        recorded = t + i < length
        ends_here = recorded and t + i == first_success
        if play:
            ends_here = t + i < length - 1 and episode.success[t + i]
        earns = recorded and (play or not over)
        window["rewards"].append(episode.rewards[t + i] if earns else 0.0)
        over = over or ends_here
        window["terminals"].append(float(ends_here))
        window["masks"].append(0.0 if over else 1.0)
    window["next_terminal"] = float(1.0 in window["terminals"])
    window["next_step"] = t + horizon_length if t + horizon_length < length else length - 1
    target_known = (window["next_terminal"] == 1.0 and not play) or t + horizon_length < length
    window["sequence_mask"] = float(target_known and not starts_after_end)
    later = any(episode.success[t:]) if play else first_success is not None and t <= first_success
    window["leads_to_success"] = float(later)
    return window


@st.composite
def plain_episodes(draw):
    """Success at the end, early, repeatedly or never; any length from one step."""
    episodes = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 12))
        ending = draw(st.sampled_from(["success", "early", "cut", "several"]))
        success = [False] * length
        if ending == "success":
            success[-1] = True
        elif ending == "early":
            success[draw(st.integers(0, length - 1))] = True
        elif ending == "several":
            first = draw(st.integers(0, length - 1))
            success[first:] = draw(st.lists(st.booleans(), min_size=length - first, max_size=length - first))
        rewards = draw(st.lists(st.integers(-3, 3).map(float), min_size=length, max_size=length))
        episodes.append(PlainEpisode(rewards, success))
    return episodes


def as_table(episodes):
    offsets = np.concatenate([[0], np.cumsum([len(e.rewards) for e in episodes])])
    columns = {
        "next.reward": np.concatenate([e.rewards for e in episodes]),
        "next.success": np.concatenate([e.success for e in episodes]),
    }
    return ColumnTable(columns, offsets, (None,), np.zeros(offsets[-1], np.int32))


@settings(max_examples=200)
@given(plain_episodes(), st.integers(1, 6), st.integers(1, 10), st.booleans())
def test_every_window_equals_the_reference(episodes, horizon_length, action_horizon, play):
    table = as_table(episodes)
    config = RewardConfig(success_ends_episode=not play)
    rewards = compute_rewards(table, tuple(range(len(episodes))), config, None)
    starts = [(e, t) for e, episode in enumerate(episodes) for t in range(len(episode.rewards))]
    positions, steps = np.array(starts).T
    rows, last = table.offsets[positions] + steps, table.offsets[positions + 1] - 1
    windows = make_windows(rows, last, rewards, horizon_length, action_horizon)
    for k, (e, t) in enumerate(starts):
        expected = reference_window(episodes[e], t, horizon_length, action_horizon, play=play)
        first_row = table.offsets[e]
        assert windows.next_rows[k] == first_row + expected["next_step"]
        assert (windows.action_rows[k] - first_row).tolist() == expected["action_steps"]
        for name in ("valid", "rewards", "masks", "terminals", "next_terminal", "sequence_mask", "leads_to_success"):
            found = windows.fields[name]
            assert found.dtype == np.float32
            assert found[k].tolist() == expected[name], (name, e, t)


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 12),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 10_000),
)
def test_the_share_of_windows_inside_is_exact(lengths, horizon_length, ratio, seed, step):
    if max(lengths) < horizon_length:
        ratio = 0.0
    sampler = WindowSampler(np.array(lengths), seed=seed, horizon_length=horizon_length, sequence_ratio=ratio)
    episodes, steps, _ = sampler.sample(step, 40)
    lengths = np.array(lengths)[episodes]
    assert ((steps >= 0) & (steps < lengths)).all()
    inside = steps + horizon_length <= lengths
    if horizon_length == 1:
        assert inside.all()
    else:
        assert inside.sum() == np.floor(40 * ratio + 0.5)


def count_starts(lengths, sequence_ratio):
    """How often each step of each episode begins a window, in 40,000 windows of 4 steps."""
    sampler = WindowSampler(lengths, seed=0, horizon_length=4, sequence_ratio=sequence_ratio)
    draws = [sampler.sample(step, 100)[:2] for step in range(400)]
    counts = np.zeros((len(lengths), max(lengths)), int)
    np.add.at(counts, tuple(np.concatenate(x) for x in zip(*draws, strict=True)), 1)
    return counts


def assert_equally_likely(counts):
    expected = sum(counts) / len(counts)
    # Chi-square with len - 1 degrees of freedom: mean len - 1, six deviations are never.
    statistic = np.square(np.array(counts) - expected).sum() / expected
    assert statistic < len(counts) + 6 * np.sqrt(2 * len(counts))


def test_every_start_of_a_kind_is_equally_likely():
    lengths = np.array([3, 10, 25])
    counts = count_starts(lengths, 0.5)
    for is_inside in (True, False):
        kind = [(e, t) for e in range(3) for t in range(lengths[e]) if (t + 4 <= lengths[e]) == is_inside]
        found = [counts[start] for start in kind]
        assert sum(found) == 20_000
        assert_equally_likely(found)


def test_without_a_share_every_start_is_equally_likely():
    lengths = np.array([3, 10, 25])
    counts = count_starts(lengths, None)
    assert_equally_likely([counts[e, t] for e in range(3) for t in range(lengths[e])])
    assert counts.sum() == 40_000


LENGTHS, STEPS_TO_SUCCESS = np.array([3, 10, 25, 8]), np.array([0, 10, 6, 0])


@pytest.mark.parametrize("sequence_ratio", [0.5, 0.8, None])
@pytest.mark.parametrize("success_ratio", [0.3, 0.8, 0.99])
def test_weighted_draws_with_more_successes_are_those_of_the_data(sequence_ratio, success_ratio):
    """Summed over the draws, the weights of each start are what its draws would be without a share of successes."""
    sampler = WindowSampler(
        LENGTHS,
        seed=0,
        horizon_length=4,
        sequence_ratio=sequence_ratio,
        success_ratio=success_ratio,
        steps_to_success=STEPS_TO_SUCCESS,
    )
    episodes, steps, importance = sampler.sample_many(range(4000), 20)
    assert importance.dtype == np.float32
    sums, squares = np.zeros((4, 25)), np.zeros((4, 25))
    np.add.at(sums, (episodes, steps), importance)
    np.add.at(squares, (episodes, steps), np.square(importance))
    starts = [(e, t) for e in range(4) for t in range(LENGTHS[e])]
    inside = {(e, t): sequence_ratio is None or t + 4 <= LENGTHS[e] for e, t in starts}
    slots = {True: 20 if sequence_ratio is None else round(20 * sequence_ratio)}
    slots[False] = 20 - slots[True]
    for start in starts:
        same_kind = sum(inside[other] == inside[start] for other in starts)
        expected = 4000 * slots[inside[start]] / same_kind
        assert abs(sums[start] - expected) < 6 * np.sqrt(squares[start]), start
    is_good = steps < STEPS_TO_SUCCESS[episodes]
    assert (is_good.sum(axis=1) >= np.floor(20 * min(success_ratio, 0.9)) - 1).all()


def test_without_a_share_of_successes_nothing_changes():
    arguments = {"seed": 42, "horizon_length": 5, "sequence_ratio": 0.7}
    plain = WindowSampler(LENGTHS, **arguments)
    never = WindowSampler(LENGTHS, success_ratio=0.9, steps_to_success=np.zeros(4, int), **arguments)
    for step in range(3):
        for one, other in zip(plain.sample(step, 16), never.sample(step, 16), strict=True):
            np.testing.assert_array_equal(one, other)
        assert (plain.sample(step, 16).importance == 1).all()


def test_a_batch_depends_on_seed_and_step_alone():
    def sampler(seed):
        return WindowSampler(np.array([50, 60]), seed=seed, horizon_length=5, sequence_ratio=0.7)

    first = sampler(1)
    in_order = [first.sample(step, 16) for step in range(5)]
    backwards = [sampler(1).sample(step, 16) for step in reversed(range(5))][::-1]
    np.testing.assert_array_equal(in_order, backwards)
    assert not np.array_equal(in_order[0], in_order[1])
    assert not np.array_equal(in_order[0], sampler(2).sample(0, 16))


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_draw_parts_of_the_same_batch(process_count):
    sampler = WindowSampler(
        np.array([50, 60, 9]),
        seed=3,
        horizon_length=5,
        sequence_ratio=0.6,
        success_ratio=0.5,
        steps_to_success=np.array([0, 30, 9]),
    )
    whole = np.stack(sampler.sample(7, 16))
    parts = [
        np.stack(sampler.sample(7, 16, process_index=i, process_count=process_count)) for i in range(process_count)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_only_chosen_episodes_are_drawn():
    sampler = WindowSampler(np.array([50, 60, 9, 30]), seed=3, horizon_length=5, sequence_ratio=0.6, episodes=[1, 3])
    episodes, steps, _ = sampler.sample(0, 200)
    assert set(episodes.tolist()) == {1, 3}
    assert steps.max() >= 30


def test_the_stream_never_changes():
    """A resumed run must see its batches whatever version resumes it."""
    sampler = WindowSampler(np.array([50, 60, 9]), seed=42, horizon_length=5, sequence_ratio=0.7)
    episodes, steps, _ = sampler.sample(1000, 8)
    assert episodes.tolist() == [0, 2, 1, 1, 1, 0, 1, 1]
    assert steps.tolist() == [38, 7, 12, 3, 8, 47, 27, 43]


def test_impossible_requests_are_refused():
    for ratio in (0.5, None):
        with pytest.raises(ValueError, match=r"no episode has horizon_length=20 steps .the longest has 9."):
            WindowSampler(np.array([5, 9]), seed=0, horizon_length=20, sequence_ratio=ratio)
    with pytest.raises(ValueError, match="no episodes"):
        WindowSampler(np.array([]), seed=0, horizon_length=2, sequence_ratio=1.0)
