"""Returns of steps and windows, against a walk through the episodes."""

import dataclasses

import numpy as np
import pytest

from acrlpd.config import RewardConfig, RLTrainConfig, apply_config_overrides, get_config, validate_config
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.outcomes import OutcomeError
from acrlpd.data.pipeline.returns import INTERVENTION_COLUMNS, compute_returns
from acrlpd.data.pipeline.rewards import StepRewards, compute_rewards
from acrlpd.data.sources import fake
from acrlpd.data.sources.source import ColumnTable, DatasetError

H, T = 4, 6
LENGTHS = (3, 9, 12, 5, 20, 1)
TASKS = np.array([0, 1, 1, 0, 0, 1], np.int32)  # of the episodes


def make_table(rng: np.random.Generator, *, play: bool) -> tuple[ColumnTable, StepRewards]:
    """Episodes of which some succeed: at their end, before their end, or several times (play)."""
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    success = rng.random(offsets[-1]) < (0.2 if play else 0.08)
    success[[offsets[1] - 1, offsets[4] + 7]] = True
    success[offsets[2] : offsets[3]] = False
    columns = {"next.success": success, "intervention": rng.random((offsets[-1], 1)) < 0.8}
    table = ColumnTable(columns, offsets, ("a", "b"), np.repeat(TASKS, LENGTHS))
    config = RewardConfig(source="success_column", success_ends_episode=not play)
    return table, compute_rewards(table, tuple(range(len(LENGTHS))), config, None)


def walk(success: np.ndarray, human: np.ndarray, start: int, longest: int, *, play: bool) -> dict[str, float]:
    """What RECAP says about the window that starts at a step of one episode."""
    length = len(success)
    ended = [t for t in range(start) if success[t]] and not play
    wins = [t for t in range(start, length) if success[t]]
    reaches = bool(wins) and wins[0] < start + H
    return_to_go = 0.0 if ended else max(-(wins[0] - start) / longest, -1.0) if wins else -1.0
    rewards = 0.0
    for _ in range(start, wins[0] if reaches else start + H):
        rewards -= 1 / longest
    return {
        "return_to_go": return_to_go,
        "rewards": rewards,
        "continues": float(start + H < length and not reaches),
        "fails": float(start + H >= length and not reaches),
        "counts": float(not ended),
        "human": float(human[start : start + T].all()),
    }


@pytest.mark.parametrize("column", INTERVENTION_COLUMNS)
@pytest.mark.parametrize("play", [False, True])
def test_returns_equal_a_walk_through_the_episode(play: bool, column: str) -> None:
    table, rewards = make_table(np.random.default_rng(3), play=play)
    columns = {"next.success": table.columns["next.success"], column: table.columns["intervention"]}
    table = dataclasses.replace(table, columns=columns)
    found = compute_returns(table, rewards, np.repeat(TASKS, LENGTHS))
    rows = np.arange(table.offsets[-1])
    windows = found.of_windows(rows, np.repeat(table.offsets[1:] - 1, LENGTHS), (H, T))
    longest = {task: max(n for n, of in zip(LENGTHS, TASKS, strict=True) if of == task) for task in (0, 1)}
    for episode, (first, end) in enumerate(zip(table.offsets, table.offsets[1:], strict=False)):
        success, human = columns["next.success"][first:end], columns[column][first:end, 0]
        for start in range(end - first):
            expected = walk(success, human, start, longest[TASKS[episode]], play=play)
            row = {name: float(getattr(windows, name)[first + start]) for name in expected}
            assert row == pytest.approx(expected, abs=1e-6), (episode, start)
    assert 0 < windows.human.mean() < 1 and 0 < windows.continues.mean() < 1
    assert (windows.counts.mean() < 1) == (not play)
    assert {-1.0} < set(windows.return_to_go.tolist())


def recap_config(**changes: object) -> RLTrainConfig:
    base = {"data.repo_id": "fake", "data.num_workers": 0}
    return apply_config_overrides(
        get_config("quickstart_recap"), base | {name.replace("__", "."): value for name, value in changes.items()}
    )


@pytest.mark.parametrize(("ends", "kind"), [(1.0, "successes"), (0.0, "failures")])
def test_labels_need_successes_and_failures(monkeypatch: pytest.MonkeyPatch, ends: float, kind: str) -> None:
    read = fake.FakeSource._read_episode

    def all_alike(self, index, names):  # type: ignore[no-untyped-def]
        table = read(self, index, names)
        for name in self._reward_columns:
            table.columns[name][-1] = ends
        return table

    monkeypatch.setattr(fake.FakeSource, "_read_episode", all_alike)
    with pytest.raises(OutcomeError, match=f"improvement recap labels good and bad .* 8 episodes .* are all {kind}"):
        open_dataset(recap_config())


@pytest.mark.parametrize("pi05", [False, True])
def test_a_prompt_that_is_too_long_once_labelled_is_refused(pi05: bool) -> None:
    with pytest.raises(
        DatasetError, match=r"'cube Advantage: negative'.* reads 25 tokens, .* Raise model.max_token_len"
    ):
        open_dataset(recap_config(model__pi05=pi05, model__max_token_len=25))
    open_dataset(recap_config(model__pi05=pi05, model__max_token_len=100 if pi05 else 26))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__online_steps": 10}, "improvement recap learns from the policy's own episodes in rounds"),
        ({"model": "state_flow"}, "the state_flow policy reads no prompt"),
        ({"acrlpd__loss_weights__bc_weight": 0.1}, "in place of plain cloning: set acrlpd.loss_weights.bc_weight 0"),
        ({"acrlpd__policy_data": "success"}, "labels them: set acrlpd.policy_data all"),
        ({"acrlpd__learnable_temperature": True}, "alpha learns only beside critics"),
        ({"evaluation__best_of_n": 4}, "could choose among 4 candidates: set evaluation.best_of_n 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    assert not validate_config(recap_config()).errors
    assert message in "\n".join(validate_config(recap_config(**changes)).errors)
