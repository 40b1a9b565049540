"""Held-out episodes: which they are, that no batch has them, and what validation reads from them."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from data_pipeline_helpers import T, batches, decode_identity, with_data
from hypothesis import given
from hypothesis import strategies as st

from acrlpd.agents.improvements.recap import RECAP
from acrlpd.config import DataConfig, QChunkingConfig, RepackConfig, RLTrainConfig
from acrlpd.config.validation import validate_config
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.dataset import Dataset, open_dataset
from acrlpd.data.pipeline.held_out import MAX_WINDOWS, read_held_out_windows, returns_to_terminal
from acrlpd.data.pipeline.held_out_choice import held_out_episodes
from acrlpd.data.pipeline.rewards import RewardOrigin, StepRewards
from acrlpd.data.sources.source import Feature
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.models.families.state_flow import StateFlowPolicyConfig


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=60), st.floats(0, 0.5))
def test_the_choice_follows_from_the_numbers_of_the_episodes(episodes: set[int], share: float) -> None:
    chosen = held_out_episodes(sorted(episodes), share)
    assert chosen <= episodes and chosen != episodes
    assert abs(len(chosen) - share * len(episodes)) <= 1
    assert chosen == held_out_episodes(sorted(episodes, reverse=True), share)
    if len(episodes) >= 10 and share > 0:
        assert chosen
    # An episode that is held out of more episodes is held out of fewer episodes, too, if as many are held out.
    grown = held_out_episodes([*episodes, 20_000], share)
    if len(grown) == len(chosen):
        assert grown - {20_000} <= chosen


@given(st.lists(st.booleans(), min_size=10, max_size=60), st.floats(0.001, 0.5))
def test_both_outcomes_are_held_out_where_there_are_enough_of_both(outcomes: list[bool], share: float) -> None:
    success = dict(enumerate(outcomes))
    by_number, chosen = held_out_episodes(range(len(success)), share), held_out_episodes(success, share, success)
    found = {success[index] for index in chosen}
    if min(outcomes.count(True), outcomes.count(False)) >= 5:
        assert found == {True, False} and len(chosen) == max(2, len(by_number))
        assert len(by_number - chosen) <= 1
    if len({success[index] for index in by_number}) == 2 or len(set(outcomes)) == 1:
        assert chosen == by_number


def test_few_episodes_are_all_trained_on_and_0_turns_it_off() -> None:
    assert held_out_episodes(range(9), 0.05) == held_out_episodes(range(1_000), 0.0) == frozenset()
    assert len(held_out_episodes(range(10), 0.001)) == 1


def test_a_share_outside_of_its_bounds_is_refused(config) -> None:
    errors = validate_config(with_data(config, validation_share=0.6)).errors
    assert "data.validation_share must lie in [0, 0.5]; found 0.6" in errors


def test_a_run_says_which_share_would_hold_an_episode_out(config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    dataset = open_dataset(with_data(config, validation_share=0.01))
    assert read_held_out_windows(dataset, with_data(config, validation_share=0.01)) is None
    [found] = re.findall(r"validation_share=0.01 holds no episode out of (\d+); (\S+) holds one out", caplog.text)
    assert int(found[0]) == len(dataset.source)
    assert len(held_out_episodes(dataset.source.indices, float(found[1]))) == 1


def test_no_batch_has_a_held_out_episode(config) -> None:
    everything = open_dataset(with_data(config, validation_share=0.0))
    assert everything.held_out is None
    split = with_data(config, validation_share=0.4)
    dataset = open_dataset(split)
    held_out, trained_on = set(dataset.held_out.source.indices), set(dataset.source.indices)
    assert held_out and held_out | trained_on == set(everything.source.indices) and not held_out & trained_on
    [batch] = batches(split, 1, batch_size=300)
    assert set(batch.episode_id.tolist()) == trained_on
    # A run that goes on keeps what it has held out, as far as the dataset still has these episodes.
    one, *_ = trained_on
    assert open_dataset(split, frozenset({one, 99})).held_out.source.indices == (one,)
    # Neither the seed of a run nor the filter of its training data changes what is held out.
    others = [dataclasses.replace(split, seed=99), with_data(split, episode_filter="success")]
    assert all(set(open_dataset(other).held_out.source.indices) == held_out for other in others)


@pytest.mark.parametrize("frames", ["cache", "decoder"])
def test_windows_show_what_was_recorded(config, frames: str) -> None:
    """The images and actions of a real dataset: from its frame cache, and from its videos."""
    changes = {"validation_share": 0.4} | ({} if frames == "cache" else {"frame_cache_dir": None})
    split = with_data(config, **changes)
    dataset = open_dataset(split)
    held_out = dataset.held_out
    windows = read_held_out_windows(dataset, split)
    assert 20 < len(windows) <= MAX_WINDOWS and windows.num_episodes == len(held_out.source)
    assert (np.diff(windows.step_id)[np.diff(windows.episode_id) == 0] > 0).all()
    for row in range(0, len(windows), 7):
        episode, step = int(windows.episode_id[row]), int(windows.step_id[row])
        assert decode_identity(windows.observations.images["base_0_rgb"][row])[:2] == (episode, step)
        recorded = actions_of(held_out, episode)[step : step + T]
        assert windows.valid[row].sum() == len(recorded)
        np.testing.assert_allclose(windows.logged[row][windows.valid[row]], recorded, atol=1e-5)
    recordings = [actions_of(dataset, episode) for episode in dataset.source.indices]
    mean = np.mean([chunk for actions in recordings for chunk in chunks_of(actions)], axis=0)
    np.testing.assert_allclose(windows.mean_action[0], mean, atol=1e-4)
    assert windows.imitated.all() and set(windows.episode_succeeds) <= {False, True}
    of_successes = dataclasses.replace(split, acrlpd=dataclasses.replace(split.acrlpd, policy_data="success"))
    labelled = dataclasses.replace(split, improvement=RECAP())  # acts with the label of good actions
    assert not windows.leads_to_success.all()
    for other in (of_successes, labelled):
        np.testing.assert_array_equal(read_held_out_windows(dataset, other).imitated, windows.leads_to_success)


def actions_of(dataset: Dataset, episode: int) -> np.ndarray:
    """The actions of an episode, as they were recorded."""
    return dataset.source.episode(dataset.source.indices.index(episode)).columns["actions"]


def chunks_of(actions: np.ndarray) -> list[np.ndarray]:
    """The chunk that begins at each step; past the end the last action repeats."""
    return [actions[np.minimum(np.arange(t, t + T), len(actions) - 1)] for t in range(len(actions))]


COLUMNS = {
    # In a dataset that has only costs, an episode that ends on 0 succeeds. Here all other episodes earn 1.
    "next.reward": ([0, -1, 0, 1], [0, -1, 0, 0]),
    # A success from the first step on is refused if all successes of the dataset are of that kind.
    "next.success": ([0, 0, 0, 1], [1, 1, 1, 1]),
}


@pytest.mark.parametrize(("column", "success"), [("next.reward", False), ("next.success", True)])
def test_what_a_success_is_follows_from_all_episodes(tmp_path: Path, column: str, success: bool) -> None:
    [odd] = held_out_episodes(range(10), 0.1)
    vector, scalar = Feature("float32", (2,)), Feature("float32", (1,))
    features = {"state": vector, "actions": vector, column: scalar}
    rng = np.random.default_rng(0)
    with LeRobotWriter(tmp_path / "data", fps=10, features=features) as writer:
        for episode in range(10):
            for value in COLUMNS[column][episode == odd]:
                moved = np.array([rng.normal(), 0.3], np.float32)  # the second dim does not move
                writer.add_step({"state": moved, "actions": moved, column: np.float32([value])}, {})
            writer.end_episode("go")
    data = DataConfig(data_dir=str(tmp_path / "data"), assets_dir=str(tmp_path), validation_share=0.1)
    config = RLTrainConfig(
        name="test",
        model=StateFlowPolicyConfig(state_dim=2, action_dim=2, action_horizon=2),
        qchunking=QChunkingConfig(horizon_length=2, action_dim=2),
        data=dataclasses.replace(data, repack=RepackConfig(state=("state",), actions=("actions",))),
    )
    write_norm_stats(config)
    dataset = open_dataset(config)
    assert dataset.rewards.success.all() and dataset.held_out.rewards.success.tolist() == [success]
    assert len(dataset.held_out.rewards.rewards) == 4 and len(dataset.rewards.rewards) == 36
    windows = read_held_out_windows(dataset, config)
    np.testing.assert_array_equal(windows.mean_action[..., 1], windows.logged[..., 1])


def test_returns_end_at_terminals_and_are_unknown_without_one() -> None:
    rng = np.random.default_rng(0)
    offsets = np.array([0, 5, 9, 15])
    rewards = rng.normal(size=15).astype(np.float32)
    terminals = np.zeros(15, bool)
    terminals[[4, 11]] = True  # the end of the first episode, and the middle of the last
    nothing = np.zeros(15, bool)
    steps = StepRewards(rewards, terminals, nothing, nothing, nothing[:3], nothing[:3], RewardOrigin.REWARD_COLUMN)
    found = returns_to_terminal(steps, offsets, 0.9)
    for row in range(15):
        end = offsets[np.searchsorted(offsets, row, side="right")]
        ahead = [t for t in range(row, end) if terminals[t]]
        if ahead:
            expected = sum(0.9 ** (t - row) * float(rewards[t]) for t in range(row, ahead[0] + 1))
            assert found[row] == pytest.approx(expected)
        else:
            assert np.isnan(found[row])
