import dataclasses
from pathlib import Path

import numpy as np
import pytest

from acrlpd.config import RewardConfig
from acrlpd.data.pipeline.labels import Label, Labels
from acrlpd.data.pipeline.rewards import RewardOrigin, compute_rewards, environment_rewards, require_success_in_time
from acrlpd.data.sources.source import ColumnTable, DatasetError


def table(**columns):
    """Two episodes of 4 and 3 steps."""
    offsets = np.array([0, 4, 7])
    arrays = {name.replace("_", "."): np.array(values) for name, values in columns.items()}
    return ColumnTable(arrays, offsets, (None,), np.zeros(7, np.int32))


def rewards_of(table, config=None, labels=None):
    return compute_rewards(table, (0, 1), config or RewardConfig(), labels)


SUCCESS = [0, 0, 0, 1, 0, 0, 0]


def test_reward_column_with_success_column():
    found = rewards_of(table(next_reward=[0.5, 0, 0, 1, 0, 0, 0.2], next_success=SUCCESS))
    assert found.rewards.tolist() == np.float32([0.5, 0, 0, 1, 0, 0, 0.2]).tolist()
    assert found.terminals.tolist() == [False] * 3 + [True] + [False] * 3
    assert found.success.tolist() == [True, False]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("zero_one", [0, 0, 0, 1, 0, 0, 0]), ("minus_one_zero", [-1, -1, -1, 0, -1, -1, -1])],
)
def test_success_column_makes_sparse_rewards(kind, expected):
    found = rewards_of(table(next_success=SUCCESS), RewardConfig(kind=kind))
    assert found.rewards.tolist() == expected
    assert np.flatnonzero(found.terminals).tolist() == [3]


@pytest.mark.parametrize(
    ("columns", "labels", "source"),
    [
        ({"next_reward": [0, 0, 1, 2, 0, 1, 1], "next_success": SUCCESS}, None, "reward_column"),
        ({"next_success": SUCCESS}, None, "success_column"),
        # Rewards alone, of which the last one is a success.
        ({"next_reward": [0, 0, 0, 1, 0, 0, 0]}, None, "reward_column"),
        (
            {"next_reward": [0, 0, 1, 2, 0, 1, 1]},
            Labels(Path("labels.json"), {0: Label(True, 4), 1: Label(False, 3)}),
            "success_column",
        ),
    ],
)
def test_what_the_policy_lives_is_rewarded_as_its_data_is(columns, labels, source):
    origin = rewards_of(table(**columns), labels=labels).origin
    assert environment_rewards(RewardConfig(scale=2.0), origin) == RewardConfig(source=source, scale=2.0)


def test_an_unknown_origin_leaves_the_choice_to_the_config():
    assert environment_rewards(RewardConfig(), None).source == "reward_column"
    assert environment_rewards(RewardConfig(source="success_column"), None).source == "success_column"


def test_the_origin_in_words():
    config = RewardConfig(reward_column="score", success_column="solved", labels_file="mine.json")
    assert {origin.name: origin.describe(config) for origin in RewardOrigin} == {
        "LABELS": "labels in mine.json",
        "REWARD_COLUMN": "column score",
        "SUCCESS_COLUMN": "column solved",
    }


def test_the_end_of_a_recording_is_no_terminal():
    """next.done marks the last step of every episode, successful or not."""
    found = rewards_of(table(next_reward=SUCCESS, next_done=[0, 0, 0, 1, 0, 0, 1]))
    assert np.flatnonzero(found.terminals).tolist() == [3]
    assert found.success.tolist() == [True, False]


def test_success_is_read_from_costs_that_end():
    found = rewards_of(table(next_reward=[-1, -1, -1, 0, -1, -1, -1]))
    assert np.flatnonzero(found.terminals).tolist() == [3]


def test_a_reward_on_the_way_is_no_success():
    found = rewards_of(table(next_reward=[0, 1, 0, 0, 0, 0, 1]))
    assert np.flatnonzero(found.terminals).tolist() == [6]


def test_a_recording_may_go_on_after_it_was_done():
    """next.done in the middle of an episode, on a reward, is where it succeeded; without a reward it is no success."""
    done = [0, 1, 0, 1, 1, 0, 1]
    found = rewards_of(table(next_reward=[0, 1, 0, 0, 0, 0, 0], next_done=done))
    assert np.flatnonzero(found.terminals).tolist() == [1]
    assert np.flatnonzero(found.after_terminal).tolist() == [2, 3]


def test_nothing_is_earned_after_the_first_success():
    found = rewards_of(table(next_success=[0, 1, 1, 0, 0, 0, 0]), RewardConfig(kind="minus_one_zero"))
    assert found.rewards.tolist() == [-1, 0, 0, 0, -1, -1, -1]
    assert np.flatnonzero(found.terminals).tolist() == [1]
    assert np.flatnonzero(found.after_terminal).tolist() == [2, 3]


def test_a_success_column_about_episodes_is_refused():
    for columns in ({}, {"next_reward": [0, 0, 0, 1, 0, 0, 0]}):
        episodes = table(next_success=[1, 1, 1, 1, 0, 0, 0], **columns)
        with pytest.raises(DatasetError, match=r"'next.success' is true from the first step of every success"):
            require_success_in_time(episodes, rewards_of(episodes), RewardConfig())


@pytest.mark.parametrize(
    "success",
    [
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 1],  # one that began solved, and one that was solved
    ],
)
def test_a_success_column_about_steps_is_accepted(success):
    steps = table(next_success=success)
    require_success_in_time(steps, rewards_of(steps), RewardConfig())


def test_an_episode_of_one_step_may_succeed_in_it():
    steps = ColumnTable({"next.success": np.array([1, 0])}, np.array([0, 1, 2]), (None,), np.zeros(2, np.int32))
    require_success_in_time(steps, rewards_of(steps), RewardConfig())


def test_scale_and_bias():
    found = rewards_of(table(next_success=[0, 1, 0, 0, 0, 0, 0]), RewardConfig(scale=2.0, bias=-0.5))
    assert found.rewards.tolist() == [-0.5, 1.5, 0, 0, -0.5, -0.5, -0.5]


LABELS = Labels(Path("x.labels.json"), {0: Label(False, 4), 1: Label(True, 3)})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("zero_one", [0, 0, 0, 0, 0, 0, 1]), ("minus_one_zero", [-1, -1, -1, -1, -1, -1, 0])],
)
def test_labels_win_over_columns(kind, expected):
    found = rewards_of(table(next_success=SUCCESS), RewardConfig(kind=kind), LABELS)
    assert found.rewards.tolist() == expected
    assert np.flatnonzero(found.terminals).tolist() == [6]
    from_column = rewards_of(table(next_success=SUCCESS), RewardConfig(source="success_column"), LABELS)
    assert np.flatnonzero(from_column.terminals).tolist() == [3]


def test_a_labelled_reward_is_that_of_the_last_step():
    labels = dataclasses.replace(LABELS, episodes={0: Label(False, 4, reward=0.25), 1: Label(True, 3)})
    found = rewards_of(table(), labels=labels)
    assert found.rewards.tolist() == [0, 0, 0, 0.25, 0, 0, 1]
    assert found.success.tolist() == [False, True]


def test_a_labelled_failure_is_an_end_with_its_own_reward():
    config = RewardConfig(kind="minus_one_zero", failure_reward=-50.0, scale=2.0, bias=1.0)
    found = rewards_of(table(), config, LABELS)
    assert found.rewards.tolist() == [-1, -1, -1, 2 * -50 + 1, -1, -1, 1]  # the reward, then scale and bias
    assert np.flatnonzero(found.terminals).tolist() == [3, 6]
    assert not found.after_terminal.any()
    assert (found.success.tolist(), found.failure.tolist()) == ([False, True], [True, False])
    assert found.leads_to_success.tolist() == [False] * 4 + [True] * 3
    without = rewards_of(table(), RewardConfig(kind="minus_one_zero"), LABELS)
    assert np.flatnonzero(without.terminals).tolist() == [6]
    assert without.outcomes == (1, 1, 0)


def test_a_label_may_have_another_reward_than_other_failures():
    labels = dataclasses.replace(LABELS, episodes={0: Label(False, 4, reward=-3.0), 1: Label(False, 3)})
    found = rewards_of(table(), RewardConfig(failure_reward=-9.0), labels)
    assert found.rewards.tolist() == [0, 0, 0, -3, 0, 0, -9]
    assert np.flatnonzero(found.terminals).tolist() == [3, 6]


@pytest.mark.parametrize(
    ("columns", "failures"),
    [
        ({"next_done": [0, 0, 0, 1, 0, 0, 1], "next_truncated": [0, 0, 0, 0, 0, 0, 1]}, [3]),
        ({"next_done": [0, 0, 0, 1, 0, 0, 1], "next_truncated": [0, 0, 0, 1, 0, 0, 0]}, [6]),
        ({"next_done": [0, 0, 0, 0, 0, 0, 0], "next_truncated": [0, 0, 0, 0, 0, 0, 0]}, []),  # cut by an operator
        ({"next_done": [0, 0, 0, 1, 0, 0, 1]}, []),  # LeRobot marks the end of every episode as done.
        ({}, []),
    ],
)
@pytest.mark.parametrize("play", [False, True])
def test_an_end_that_is_no_time_limit_is_a_failure(columns, failures, play):
    config = RewardConfig(failure_reward=-5.0, success_ends_episode=not play)
    for rewards in ({"next_success": [0] * 7}, {"next_success": [0] * 7, "next_reward": [0.25] * 7}):
        found = rewards_of(table(**rewards, **columns), config)
        assert np.flatnonzero(found.terminals).tolist() == failures
        assert np.flatnonzero(found.rewards == -5).tolist() == failures
        assert found.failure.sum() == len(failures)


def test_a_success_is_no_failure():
    columns = {"next_done": [0, 0, 0, 1, 0, 0, 1], "next_truncated": [0] * 7}
    found = rewards_of(table(next_success=[0, 1, 0, 0, 0, 0, 0], **columns), RewardConfig(failure_reward=-5.0))
    assert found.rewards.tolist() == [0, 1, 0, 0, 0, 0, -5]
    assert np.flatnonzero(found.terminals).tolist() == [1, 6]
    assert found.outcomes == (1, 1, 0)


def test_missing_labels_are_listed():
    labels = dataclasses.replace(LABELS, episodes={0: Label(False, 4)})
    with pytest.raises(DatasetError, match=r"1 of 2 episodes have no label in x.labels.json: 1\."):
        rewards_of(table(), labels=labels)


def test_a_dataset_without_rewards_is_refused():
    with pytest.raises(DatasetError, match=r"'next.reward' or 'next.success' and no labels.*acrlpd data label"):
        rewards_of(table(action=np.zeros((7, 2))))
    with pytest.raises(DatasetError, match="no labels file"):
        rewards_of(table(next_success=SUCCESS), RewardConfig(source="labels"))
    with pytest.raises(DatasetError, match=r"asks for the column 'score'; the dataset has next.success"):
        rewards_of(table(next_success=SUCCESS), RewardConfig(source="reward_column", reward_column="score"))


def test_rewards_that_are_not_numbers_are_located():
    with pytest.raises(DatasetError, match="reward of step 1 in the episode at position 1 is nan"):
        rewards_of(table(next_reward=[0, 0, 0, 0, 0, np.nan, 0]))
