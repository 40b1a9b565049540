"""Batches of two parts: how much of each, from where, and always the same."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acrlpd.batch import Batch
from acrlpd.config import DataConfig, QChunkingConfig, RewardConfig, RLTrainConfig
from acrlpd.config.presets import debug
from acrlpd.data.frames.store import resize_with_pad
from acrlpd.data.pipeline.batches import interleave
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.loader import DataLoader, create_data_loader
from acrlpd.data.pipeline.replay import Replay, ReplayDataset
from acrlpd.data.pipeline.tokenizer import create_tokenizer
from acrlpd.data.sources.source import Feature
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

H, T = 4, 6
SIZE = 24
FIRST = 100  # episodes of the replay count from here; those of the dataset are 0 to 7
FEATURES = {
    "observation.state": Feature("float32", (9,)),
    "action": Feature("float32", (5,)),
    "next.reward": Feature("float32", ()),
    "next.done": Feature("bool", ()),
    "next.success": Feature("bool", ()),
}
CONFIG = dataclasses.replace(
    debug.CONFIG,
    batch_size=SIZE,
    seed=5,
    model=StateFlowPolicyConfig(state_dim=9, action_dim=5, action_horizon=T),
    qchunking=QChunkingConfig(horizon_length=H, action_dim=5, sequence_ratio=0.5),
    data=DataConfig(repo_id="fake", num_workers=0),
)


def lived(number: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    last = np.arange(length) == length - 1
    return {
        "observation.state": rng.normal(size=(length, 9)).astype(np.float32),
        "action": rng.normal(size=(length, 5)).astype(np.float32),
        "next.reward": rng.normal(size=length).astype(np.float32),
        "next.done": last,
        "next.success": last & (number % 3 == 0),
    }


def write_replay(root: pathlib.Path, lengths: list[int]) -> Replay:
    replay = Replay(root, FEATURES, fps=10)
    for i, length in enumerate(lengths):
        replay.write(FIRST + i, lived(FIRST + i, length), "do nothing")
    return replay


class Mixed:
    """A loader and a replay that it takes windows from."""

    def __init__(self, replay: Replay, config: RLTrainConfig = CONFIG, **options: Any) -> None:
        self.loader = DataLoader(open_dataset(config), config, batch_size=config.batch_size, **options)
        self.replay = ReplayDataset(replay, config, self.loader.dataset)

    def admit(self, numbers: range, ratio: float | None) -> None:
        self.loader.mix_replay(self.replay.admit(numbers), ratio)

    def batches(self, count: int) -> list[Batch]:
        return [self.loader.sample_batch() for _ in range(count)]

    def __enter__(self) -> "Mixed":
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()
        self.replay.close()


@pytest.fixture
def replay(tmp_path: pathlib.Path) -> Iterator[Replay]:
    yield write_replay(tmp_path / "replay", [7, 12, 3, 20, 9])


def from_replay(batch: Batch) -> np.ndarray:
    return np.asarray(batch.episode_id) >= FIRST


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.7, 1.0])
def test_every_batch_has_its_share_evenly_spread(replay: Replay, ratio: float) -> None:
    with Mixed(replay) as mixed:
        mixed.admit(range(FIRST, FIRST + 5), ratio)
        for batch in mixed.batches(4):
            chosen = from_replay(batch)
            assert (~chosen).sum() == round(ratio * SIZE)
            for shards in (2, 4, 8):
                shares = [part.sum() for part in np.split(chosen, shards)]
                assert max(shares) - min(shares) <= 1
                inside = [part.sum() for part in np.split(np.asarray(batch.valid)[:, H - 1] > 0, shards)]
                assert max(inside) - min(inside) <= 2


def test_one_buffer_draws_every_step_equally_often(tmp_path: pathlib.Path) -> None:
    """Dataset and replay in one buffer: each has the share of the windows that it has of the steps."""
    config = dataclasses.replace(CONFIG, qchunking=dataclasses.replace(CONFIG.qchunking, sequence_ratio=None))
    with Mixed(write_replay(tmp_path, [300, 7, 90]), config) as mixed:
        mixed.admit(range(FIRST, FIRST + 3), None)
        lengths = np.diff(mixed.loader.dataset.table.offsets)
        expected = dict(enumerate(lengths)) | {FIRST: 300, FIRST + 1: 7, FIRST + 2: 90}
        found = collections.Counter(int(i) for batch in mixed.batches(500) for i in batch.episode_id)
        counts = np.array([found[i] for i in expected])
        wanted = np.array(list(expected.values())) * 500 * SIZE / sum(expected.values())
        assert (np.abs(counts - wanted) < 5 * np.sqrt(wanted)).all()


def test_the_replay_does_not_follow_the_dataset(tmp_path: pathlib.Path) -> None:
    """With as many episodes of the same lengths, the same draws would give the same steps of both in every batch."""
    with create_data_loader(CONFIG) as loader:
        lengths = loader.dataset.source.lengths.tolist()
    with Mixed(write_replay(tmp_path / "replay", lengths)) as mixed:
        mixed.admit(range(FIRST, FIRST + len(lengths)), 0.5)
        for batch in mixed.batches(3):
            chosen = from_replay(batch)
            assert chosen.sum() == SIZE // 2
            windows = np.stack([batch.episode_id % FIRST, batch.step_id])
            assert not np.array_equal(windows[:, chosen], windows[:, ~chosen])


class Part(NamedTuple):
    source: np.ndarray
    step_id: np.ndarray


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_interleaving_keeps_everything_in_order_and_spreads_it(sizes: list[int]) -> None:
    parts = [Part(np.full(n, i), np.arange(n)) for i, n in enumerate(sizes)]
    whole = interleave(parts)  # type: ignore[arg-type]
    for i, n in enumerate(sizes):
        np.testing.assert_array_equal(whole.step_id[whole.source == i], np.arange(n))
        before = np.concatenate([[0], np.cumsum(whole.source == i)])
        expected = np.arange(sum(sizes) + 1) * n / sum(sizes)
        assert np.abs(before - expected).max() <= len(sizes) / 2 + 0.5


def test_windows_of_the_replay_are_what_was_lived(replay: Replay) -> None:
    """Brute force over every field of every window; actions and states are not normalised for fake data."""
    with Mixed(replay) as mixed:
        mixed.admit(range(FIRST, FIRST + 5), 0.5)
        seen = set()
        for batch in mixed.batches(20):
            for k in np.flatnonzero(from_replay(batch)):
                number, t = int(batch.episode_id[k]), int(batch.step_id[k])
                seen.add(number)
                columns = lived(number, {FIRST: 7, 101: 12, 102: 3, 103: 20, 104: 9}[number])
                length = len(columns["action"])
                success = number % 3 == 0
                np.testing.assert_array_equal(batch.observations.state[k], columns["observation.state"][t])
                following = columns["observation.state"][min(t + H, length - 1)]
                np.testing.assert_array_equal(batch.next_observations.state[k], following)
                for i in range(T):
                    np.testing.assert_array_equal(batch.actions[k, i], columns["action"][min(t + i, length - 1)])
                    assert batch.valid[k, i] == (t + i < length)
                for i in range(H):
                    ends = success and t + i == length - 1
                    assert batch.rewards[k, i] == (columns["next.reward"][t + i] if t + i < length else 0)
                    assert batch.terminals[k, i] == ends
                    assert batch.masks[k, i] == (not success or t + i < length - 1)
                reaches_end = t + H >= length
                assert batch.next_terminal[k] == (success and reaches_end)
                assert batch.sequence_mask[k] == (success or not reaches_end)  # a time limit is no terminal
                assert batch.leads_to_success[k] == success
                assert batch.task_id[k] == batch.task_id[0]  # Dataset and replay have the same prompt.
        assert seen == set(range(FIRST, FIRST + 5))


def test_an_environment_that_ends_on_a_failure_gives_the_critics_an_end(tmp_path: pathlib.Path) -> None:
    """The failure is a terminal with its own reward. An episode that a time limit cut is not."""
    replay = Replay(tmp_path, FEATURES | {"next.truncated": Feature("bool", ())}, fps=10)
    for number, is_cut in ((FIRST, False), (FIRST + 1, True)):
        columns = lived(number, 9)
        last = columns["next.done"]
        replay.write(number, columns | {"next.success": last & False, "next.truncated": last & is_cut}, "do nothing")
    rewards = RewardConfig(source="success_column", failure_reward=-3.0, scale=2.0)
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, rewards=rewards))
    with Mixed(replay, config) as mixed:
        mixed.admit(range(FIRST, FIRST + 2), 0.0)
        seen = set()
        for batch in mixed.batches(4):
            for k in range(SIZE):
                failed, t = int(batch.episode_id[k]) == FIRST, int(batch.step_id[k])
                ends = [failed and t + i == 8 for i in range(H)]
                assert batch.terminals[k].tolist() == ends
                assert batch.rewards[k].tolist() == [-6.0 if end else 0.0 for end in ends]
                assert batch.sequence_mask[k] == (failed or t + H <= 8)
                assert batch.leads_to_success[k] == 0
                seen.add((failed, any(ends)))
    assert seen == {(True, True), (True, False), (False, False)}


def test_without_replay_in_the_mix_nothing_changes(replay: Replay) -> None:
    with create_data_loader(CONFIG) as plain:
        expected = [plain.sample_batch() for _ in range(4)]
    with Mixed(replay) as mixed:
        found = mixed.batches(2)
        mixed.admit(range(FIRST, FIRST + 5), 1.0)
        assert_equal(found + mixed.batches(2), expected)


def growing(replay: Replay, num_workers: int) -> list[Batch]:
    data = dataclasses.replace(CONFIG.data, num_workers=num_workers, prefetch_batches=3)
    with Mixed(replay, dataclasses.replace(CONFIG, data=data)) as mixed:
        found = mixed.batches(2)
        mixed.admit(range(FIRST, FIRST + 2), 0.5)
        found += mixed.batches(2)
        mixed.admit(range(FIRST + 2, FIRST + 5), 0.5)
        return found + mixed.batches(3)


def test_batches_do_not_depend_on_workers_while_the_replay_grows(replay: Replay) -> None:
    expected = growing(Replay(replay.root, FEATURES, 10), num_workers=0)
    replay_ids = [{int(i) for i in batch.episode_id if i >= FIRST} for batch in expected]
    assert replay_ids[:2] == [set(), set()]
    assert set.union(*replay_ids[2:4]) == {FIRST, FIRST + 1}
    assert set.union(*replay_ids[4:]) == set(range(FIRST, FIRST + 5))
    for num_workers in (1, 4):
        assert_equal(growing(Replay(replay.root, FEATURES, 10), num_workers), expected)


def test_a_resumed_loader_goes_on_with_the_same_batches(replay: Replay) -> None:
    expected = growing(Replay(replay.root, FEATURES, 10), num_workers=0)
    with Mixed(Replay(replay.root, FEATURES, 10)) as mixed:
        mixed.batches(2)
        mixed.admit(range(FIRST, FIRST + 2), 0.5)
        mixed.batches(1)
        state = mixed.loader.state_dict()
    with Mixed(replay) as mixed:
        mixed.loader.load_state_dict(state)
        mixed.admit(range(FIRST, FIRST + 2), 0.5)
        found = mixed.batches(1)
        mixed.admit(range(FIRST + 2, FIRST + 5), 0.5)
        assert_equal(found + mixed.batches(3), expected[3:])


def windows(batches: list[Batch]) -> collections.Counter[tuple[int, int]]:
    return collections.Counter(
        (int(e), int(t)) for batch in batches for e, t in zip(batch.episode_id, batch.step_id, strict=True)
    )


def test_two_processes_share_the_windows_of_one(replay: Replay) -> None:
    with Mixed(Replay(replay.root, FEATURES, 10)) as mixed:
        mixed.admit(range(FIRST, FIRST + 5), 0.5)
        whole = mixed.batches(2)
    parts = []
    for index in range(2):
        with Mixed(Replay(replay.root, FEATURES, 10), process_index=index, process_count=2) as mixed:
            mixed.admit(range(FIRST, FIRST + 5), 0.5)
            parts += mixed.batches(2)
    assert [from_replay(part).sum() for part in parts] == [SIZE // 4] * 4
    assert windows(parts) == windows(whole)


def test_episodes_shorter_than_a_chunk_are_learned_from(tmp_path: pathlib.Path) -> None:
    with Mixed(write_replay(tmp_path, [2, 3])) as mixed:
        mixed.admit(range(FIRST, FIRST + 2), 0.5)
        (batch,) = mixed.batches(1)
    assert from_replay(batch).sum() == SIZE // 2


@pytest.mark.parametrize("kind", ["zero_one", "minus_one_zero"])
def test_rewards_of_the_replay_are_of_the_kind_of_the_data(replay: Replay, kind: Any) -> None:
    rewards = RewardConfig(source="success_column", kind=kind, scale=2.0, bias=0.25)
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, rewards=rewards))
    with Mixed(replay, config) as mixed:
        mixed.admit(range(FIRST, FIRST + 5), 0.0)
        (batch,) = mixed.batches(1)
    terminals, inside = np.asarray(batch.terminals), np.asarray(batch.valid)[:, :H]
    expected = 2 * (terminals - (kind == "minus_one_zero")) + 0.25
    np.testing.assert_array_equal(batch.rewards, np.where(inside > 0, expected, 0))
    assert terminals.any()


def test_frames_and_prompts_of_the_replay_go_the_way_of_the_data(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(debug.CONFIG, data=dataclasses.replace(debug.CONFIG.data, num_workers=1))
    features = FEATURES | {
        "observation.state": Feature("float32", (7,)),
        "action": Feature("float32", (7,)),
        "image": Feature("video", (30, 40, 3)),
    }
    replay = Replay(tmp_path, features, fps=10)
    for number in (FIRST, FIRST + 1):
        columns = lived(number, 8)
        rng = np.random.default_rng(number)
        columns |= {name: rng.normal(size=(8, 7)).astype(np.float32) for name in ("observation.state", "action")}
        columns["image"] = np.broadcast_to(rng.integers(0, 256, (8, 1, 1, 3), np.uint8), (8, 30, 40, 3))
        replay.write(number, columns, f"task {number}")
    with Mixed(replay, config) as mixed:
        mixed.admit(range(FIRST, FIRST + 1), 0.5)
        mixed.admit(range(FIRST + 1, FIRST + 2), 0.5)
        (batch,) = mixed.batches(1)
    stored = Replay(tmp_path, features, fps=10)
    stored.admit([FIRST, FIRST + 1])
    assert isinstance(config.model, Pi0Config)
    tokenizer = create_tokenizer(config.data.tokenizer, config.model.prompt_len)
    for k in np.flatnonzero(from_replay(batch)):
        episode = stored.episode(int(batch.episode_id[k]) - FIRST)
        t = int(batch.step_id[k])
        frames = resize_with_pad(episode.frames("image", [t, min(t + 5, 7)]), 28, 28)
        np.testing.assert_array_equal(batch.observations.images["base_0_rgb"][k], frames[0])
        np.testing.assert_array_equal(batch.next_observations.images["base_0_rgb"][k], frames[1])
        tokens, _ = tokenizer.tokenize([f"task {batch.episode_id[k]}"])
        for observation in (batch.observations, batch.next_observations):
            assert observation.tokenized_prompt is not None
            np.testing.assert_array_equal(observation.tokenized_prompt[k], tokens[0])


def test_a_closed_loader_cannot_be_mixed(replay: Replay) -> None:
    loader = create_data_loader(CONFIG)
    dataset = ReplayDataset(replay, CONFIG, loader.dataset).admit([FIRST])
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.mix_replay(dataset, 0.5)
