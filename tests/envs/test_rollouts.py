"""Rollouts by chunks: whole episodes, the same whatever the machine, none lost that was finished."""

import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pool_time import TIMEOUT_S, use_pool_time
from toy_env import MAX_STEPS, seeded_chunks

from acrlpd.envs import Chunks, EnvError, EnvPool, Rollout, make_env, rollouts
from acrlpd.execution.base import Columns
from acrlpd.execution.open_loop import OpenLoop


@pytest.fixture(scope="module")
def envs() -> Iterator[EnvPool]:
    with EnvPool("toy", 4, num_workers=0) as pool:
        yield pool


def by_seed(episodes: Iterator[Rollout]) -> dict[int, Rollout]:
    return {episode.seed: episode for episode in episodes}


def test_every_seed_gives_one_whole_episode(envs: EnvPool) -> None:
    episodes = list(rollouts(envs, seeded_chunks, range(9), execution=OpenLoop(3)))
    assert sorted(episode.seed for episode in episodes) == list(range(9))
    for episode in episodes:
        assert episode.terminated == episode.succeeded == episode.success[-1]
        assert episode.succeeded or episode.length == MAX_STEPS
        assert not episode.success[:-1].any()
        assert len(episode.actions) == len(episode.success) == episode.length
        np.testing.assert_array_equal(episode.chunk_steps, np.arange(math.ceil(episode.length / 3)) * 3)
        assert episode.observations == {}


def test_recorded_observations_are_those_before_each_action(envs: EnvPool) -> None:
    """A slow but obvious loop over one environment must see what the rollout recorded."""
    for episode in rollouts(envs, seeded_chunks, range(5), execution=OpenLoop(4), record=True):
        env = make_env("toy")
        env.reset(episode.seed)
        for t in range(episode.length):
            for name, value in env.observe().items():
                np.testing.assert_array_equal(episode.observations[name][t], value)
            step = env.step(episode.actions[t])
            assert (step.reward, step.success) == (episode.rewards[t], episode.success[t])
        assert step.terminated == episode.terminated


def test_what_is_recorded_does_not_change_what_happens(envs: EnvPool) -> None:
    recorded = by_seed(rollouts(envs, seeded_chunks, range(6), execution=OpenLoop(4), record=True))
    plain = by_seed(rollouts(envs, seeded_chunks, range(6), execution=OpenLoop(4)))
    for seed in range(6):
        np.testing.assert_array_equal(recorded[seed].actions, plain[seed].actions)
        np.testing.assert_array_equal(recorded[seed].values["q"], plain[seed].values["q"])


def test_the_result_does_not_depend_on_the_number_of_processes(envs: EnvPool) -> None:
    here = by_seed(rollouts(envs, seeded_chunks, range(10), execution=OpenLoop(3)))
    with EnvPool("toy", 4, num_workers=2) as others:
        there = by_seed(rollouts(others, seeded_chunks, range(10), execution=OpenLoop(3)))
    for seed in range(10):
        np.testing.assert_array_equal(here[seed].actions, there[seed].actions)


def test_the_policy_always_sees_the_same_shape_and_is_asked_once_per_chunk(envs: EnvPool) -> None:
    shapes = []

    def policy(observations: Columns, prompts: list[str], seeds: list[int]) -> Chunks:
        shapes.append(observations["observation.state"].shape)
        assert prompts == ["go right"] * 2
        return Chunks(np.zeros((2, 4, 2), np.float32))  # nobody moves: all episodes are equally long

    assert len(list(rollouts(envs, policy, range(5), execution=OpenLoop(4)))) == 5
    assert set(shapes) == {(2, 3)}
    # Slots 0 and 1 play two episodes each in turn with slots 2 and 3: seeds 0 and 1, 2 and 3, 4.
    assert len(shapes) == 3 * math.ceil(MAX_STEPS / 4)


def test_the_noise_of_an_observation_follows_from_its_episode_and_turn(envs: EnvPool) -> None:
    """Neither the number of environments nor the other episodes change the noise of an episode."""

    def noise_of(pool: EnvPool, seeds: list[int], policy_seed: int) -> set[tuple[float, int]]:
        asked = set()

        def policy(observations: Columns, prompts: list[str], seeds: list[int]) -> Chunks:
            starts = observations["observation.state"][:, 0].tolist()
            asked.update(zip(starts, seeds, strict=True))
            return Chunks(np.zeros((len(prompts), 4, 2), np.float32))  # nobody moves: the state names the episode

        list(rollouts(pool, policy, seeds, execution=OpenLoop(4), policy_seed=policy_seed))
        return asked

    all_noise = noise_of(envs, [0, 1, 2, 3, 4], 7)
    assert len(all_noise) == len({seed for _, seed in all_noise}) == 5 * math.ceil(MAX_STEPS / 4)
    with EnvPool("toy", 1, num_workers=0) as one:
        assert noise_of(one, [4, 0, 3, 1, 2], 7) == all_noise
    assert not {seed for _, seed in noise_of(envs, [0, 1, 2, 3, 4], 8)} & {seed for _, seed in all_noise}


def test_the_first_episodes_are_filmed(envs: EnvPool) -> None:
    films = {e.seed: e.video for e in rollouts(envs, seeded_chunks, range(4), execution=OpenLoop(4), films=2)}
    assert [bool(films[seed]) for seed in range(4)] == [True, True, False, False]
    lengths = {e.seed: e.length for e in rollouts(envs, seeded_chunks, range(4), execution=OpenLoop(4))}
    assert len(films[0]) == lengths[0] + 1


def test_what_cannot_be_filmed_costs_no_episode() -> None:
    with EnvPool("toy-blind-1", 2, num_workers=0, cameras=()) as envs:
        with pytest.raises(EnvError, match="no graphics here"):
            list(rollouts(envs, seeded_chunks, range(3), execution=OpenLoop(4), films=1))
        assert len(list(rollouts(envs, seeded_chunks, range(3), execution=OpenLoop(4)))) == 3


def test_an_abandoned_generator_leaves_the_environments_usable() -> None:
    with EnvPool("toy", 4, num_workers=2, cameras=()) as envs:
        for episode in rollouts(envs, seeded_chunks, range(100), execution=OpenLoop(3)):
            assert episode.length > 0
            break
        expected = {0, 1, 2}
        assert set(by_seed(rollouts(envs, seeded_chunks, range(3), execution=OpenLoop(3)))) == expected


@pytest.mark.parametrize("fault", ["crash", "raise", "hang"])
def test_an_episode_lost_once_is_played_again(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pool_time(monkeypatch, tmp_path)
    with EnvPool(f"toy-{fault}-2-once", 4, num_workers=2, cameras=(), timeout_s=TIMEOUT_S) as envs:
        episodes = list(rollouts(envs, seeded_chunks, range(8), execution=OpenLoop(3)))
        assert sorted(episode.seed for episode in episodes) == list(range(8))
        assert len(envs.failures) >= 1


def test_an_episode_that_always_fails_is_left_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with EnvPool("toy-nan-2", 2, num_workers=0, cameras=()) as envs:
        episodes = by_seed(rollouts(envs, seeded_chunks, range(5), execution=OpenLoop(3)))
        assert set(episodes) == {0, 1, 3, 4}
        assert [failure.reason.partition(": ")[2][:17] for failure in envs.failures] == ["observation.state"] * 2
    assert "the episode with seed 2 is left out" in caplog.text


def test_environments_that_are_killed_together_are_one_mishap() -> None:
    """As by a signal to the whole process group: more failures in a row than an environment may have."""
    asked = []

    def policy(observations: Columns, prompts: list[str], seeds: list[int]) -> Chunks:
        asked.append(seeds)
        if len(asked) == 3:
            for child in multiprocessing.active_children():
                child.terminate()
                child.join()
        return seeded_chunks(observations, prompts, seeds)

    with EnvPool("toy", 24, num_workers=2, cameras=()) as envs:
        episodes = by_seed(rollouts(envs, policy, range(24), execution=OpenLoop(3)))
        assert len(envs.failures) >= 12
    assert sorted(episodes) == list(range(24))


def test_an_environment_that_never_works_ends_in_an_error_not_in_a_loop() -> None:
    words = r"failed 10 times in a row; the last time: .*physics exploded"
    with (
        EnvPool("toy-raise-2", 2, num_workers=0, cameras=()) as envs,
        pytest.raises(EnvError, match=words),
    ):
        list(rollouts(envs, seeded_chunks, [2] * 100, execution=OpenLoop(4)))


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (np.full((2, 4, 2), np.nan), "not finite"),
        (np.zeros((2, 2, 2)), r"must give chunks \[2, 3 or more, 2\].*found \[2, 2, 2\]"),
        (np.zeros((2, 4, 5)), r"found \[2, 4, 5\]"),
    ],
)
def test_a_bad_policy_is_refused(envs: EnvPool, actions: np.ndarray, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        list(rollouts(envs, lambda *_: Chunks(actions), range(2), execution=OpenLoop(3)))


def test_an_episode_that_is_over_is_not_lost_when_the_next_one_ends_the_rollouts() -> None:
    asked: list[list[int]] = []

    def diverging(observations: Columns, prompts: list[str], seeds: list[int]) -> Chunks:
        asked.append(seeds)
        is_second = len(asked) > MAX_STEPS / 4  # nobody moves, so an episode has all steps
        return Chunks(np.full((1, 4, 2), np.nan if is_second else 0.0, np.float32))

    finished: list[int] = []
    with EnvPool("toy", 1, num_workers=0, cameras=()) as envs, pytest.raises(EnvError, match="not finite"):
        finished.extend(episode.seed for episode in rollouts(envs, diverging, range(2), execution=OpenLoop(4)))
    assert finished == [0]


def test_the_noise_of_a_chunk_is_recorded_with_each_of_its_steps(envs: EnvPool) -> None:
    told: dict[tuple[float, ...], np.ndarray] = {}

    def with_noise(observations: Columns, prompts: list[str], seeds: list[int]) -> Chunks:
        noise = np.stack([np.random.default_rng(seed).normal(size=3) for seed in seeds]).astype(np.float32)
        chunks = seeded_chunks(observations, prompts, seeds)
        told.update({tuple(state): z for state, z in zip(observations["observation.state"], noise, strict=True)})
        return Chunks(chunks.actions, chunks.values, noise)

    for episode in rollouts(envs, with_noise, range(5), execution=OpenLoop(4), record=True):
        recorded, states = episode.columns()["policy_noise"], episode.observations["observation.state"]
        assert recorded.shape == (episode.length, 3)
        for t in range(episode.length):
            np.testing.assert_array_equal(recorded[t], told[tuple(states[t - t % 4])])


def test_columns_are_those_of_a_dataset(envs: EnvPool) -> None:
    (episode,) = rollouts(envs, seeded_chunks, [3], execution=OpenLoop(4), record=True)
    columns = episode.columns("actions")
    assert set(columns) == {
        "observation.state",
        "observation.images.side",
        "actions",
        "next.reward",
        "next.done",
        "next.truncated",
        "next.success",
    }
    assert all(len(values) == episode.length for values in columns.values())
    assert columns["next.done"].tolist() == [False] * (episode.length - 1) + [True]
    assert columns["next.truncated"].tolist() == [False] * (episode.length - 1) + [not episode.terminated]
