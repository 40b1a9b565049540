"""Rounds of episodes: what is on disk counts, whoever was interrupted and whatever the environment does."""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pool_time import TIMEOUT_S, use_pool_time
from toy_env import MAX_STEPS, Toy, ToyEnv, seeded_chunks
from training_helpers import online_config

from acrlpd.checksums import write_json_with_checksum
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.data.pipeline.replay import Replay, ReplayDataset, ReplayError
from acrlpd.envs import Chunks, Env, EnvError, EnvPool, register_env
from acrlpd.policies.policy import create_policy
from acrlpd.training.online.phase import OnlinePhase
from acrlpd.training.online.records import read_round, read_rounds, verify_rounds
from acrlpd.training.online.rounds import (
    RoundPlayer,
    SynchronousPlayer,
    create_online_policy,
    episode_seed,
    open_replay,
)

SEED, SIZE = 0, 3


class Broken(Toy):
    def step(self, action: Any) -> Any:
        raise RuntimeError("no physics today")


def make_broken(name: str, **options: Any) -> Env:
    return ToyEnv(Broken("toy"), name=name, prompt="go right", fps=10, cameras=(), max_episode_steps=MAX_STEPS)


register_env("broken-toy", make_broken)


@contextlib.contextmanager
def player_of(
    directory: pathlib.Path, env: str = "toy", size: int = SIZE, seed: int = SEED, **pool: Any
) -> Iterator[RoundPlayer]:
    config = online_config(directory, seed=seed, online__episodes_per_round=size)
    options = {"num_workers": 0, "cameras": ()} | pool
    with EnvPool(env, 2, **options) as envs:
        yield RoundPlayer(config, envs, open_replay(directory, config, envs.spec))


def files_of(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((directory / "replay").iterdir())}


def test_a_round_is_what_is_on_disk(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path) as player:
        rounds = [player.play(number, seeded_chunks, policy_step=7 * number) for number in range(2)]
    assert [played.episodes for played in rounds] == [(0, 1, 2), (3, 4, 5)]
    assert [played.policy_step for played in rounds] == [0, 7]
    root = tmp_path / "replay"
    assert read_rounds(root, 0) == rounds
    assert read_rounds(root, 1) == rounds[1:]
    assert read_round(root, 2) is None
    for played in rounds:
        for number, length, success, total in zip(
            played.episodes, played.lengths, played.successes, played.returns, strict=True
        ):
            with np.load(root / f"episode-{number:08d}-{length}.npz") as shard:
                assert len(shard["column/action"]) == length
                assert shard["column/next.success"].any() == success
                assert shard["column/next.reward"].sum(dtype=np.float64) == total
                start = np.random.default_rng(episode_seed(SEED, number)).uniform(0.0, 0.2)
                assert shard["column/observation.state"][0, 0] == np.float32(start)
    metrics = rounds[0].metrics()
    assert metrics["episodes"] == 3 and metrics["lost_episodes"] == 0
    assert metrics["success_rate"] == pytest.approx(np.mean(rounds[0].successes))


def test_every_round_of_every_run_has_its_own_episodes_and_noise(tmp_path: pathlib.Path) -> None:
    """A policy that explores the same way in every round, or in every run, would live the same again and again."""
    starts: list[float] = []
    noise: list[int] = []

    def policy(observations: Any, prompts: Any, seeds: list[int]) -> Chunks:
        noise.extend(seeds)
        return seeded_chunks(observations, prompts, seeds)

    for seed in (0, 1):
        with player_of(tmp_path / str(seed), size=2, seed=seed) as player:
            for number in range(2):
                played = player.play(number, policy, 0)
                for episode, length in zip(played.episodes, played.lengths, strict=True):
                    with np.load(tmp_path / str(seed) / "replay" / f"episode-{episode:08d}-{length}.npz") as shard:
                        starts.append(float(shard["column/observation.state"][0, 0]))
    assert len(set(starts)) == len(starts) == 8
    assert len(set(noise)) == len(noise)


def test_an_interrupted_round_comes_to_the_same_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with player_of(tmp_path / "straight") as player:
        expected = player.play(0, seeded_chunks, 0)
    write = Replay.write

    def interrupted(self: Replay, number: int, *args: Any) -> None:
        if number != first:
            raise KeyboardInterrupt
        write(self, number, *args)

    for first in range(SIZE):
        directory = tmp_path / str(first)
        with player_of(directory) as player:
            monkeypatch.setattr(Replay, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                player.play(0, seeded_chunks, 0)
            monkeypatch.setattr(Replay, "write", write)
            assert player.play(0, seeded_chunks, 0) == expected
        assert files_of(directory) == files_of(tmp_path / "straight")


def test_rounds_of_another_size_go_on_after_those_before(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path, size=3) as player:
        player.play(0, seeded_chunks, 0)
    with player_of(tmp_path, size=2) as player:
        assert player.play(1, seeded_chunks, 1).episodes == (3, 4)
    with player_of(tmp_path, size=4) as player:
        assert player.play(2, seeded_chunks, 2).episodes == (5, 6, 7, 8)


def stand_still(observations: Any, prompts: Any, seeds: Any) -> Chunks:
    return Chunks(np.zeros((len(prompts), 4, 2), np.float32))


def test_another_policy_finishes_a_round_without_touching_what_is_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor that was killed is followed by one with a newer policy."""
    write = Replay.write

    def dies_after_one(self: Replay, number: int, *args: Any) -> None:
        write(self, number, *args)
        raise KeyboardInterrupt

    with player_of(tmp_path) as player:
        monkeypatch.setattr(Replay, "write", dies_after_one)
        with pytest.raises(KeyboardInterrupt):
            player.play(0, seeded_chunks, 0)
        monkeypatch.setattr(Replay, "write", write)
        (first,) = files_of(tmp_path)
        assert f"-{MAX_STEPS}.npz" not in first  # it moved, and arrived
        played = player.play(0, stand_still, 50)
    assert first in files_of(tmp_path)
    assert len(files_of(tmp_path)) == SIZE + 1
    index = played.episodes.index(int(first.split("-")[1]))
    assert played.successes == tuple(i == index for i in range(SIZE))
    assert played.lengths[index] == int(first.removesuffix(".npz").split("-")[2])
    assert [length for i, length in enumerate(played.lengths) if i != index] == [MAX_STEPS] * (SIZE - 1)


@pytest.mark.parametrize("fault", ["raise", "nan", "shape", "reward"])
def test_an_environment_that_fails_costs_its_episode(tmp_path: pathlib.Path, fault: str) -> None:
    with player_of(tmp_path, f"toy-{fault}-{episode_seed(SEED, 1)}") as player:
        played = player.play(0, seeded_chunks, 0)
        assert played.episodes == (0, 2)
        assert played.metrics()["lost_episodes"] == 1
        assert player.play(1, seeded_chunks, 0).episodes == (3, 4, 5)


def test_an_environment_that_hangs_costs_its_episode(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pool_time(monkeypatch, tmp_path)
    env = f"toy-hang-{episode_seed(SEED, 1)}"
    with player_of(tmp_path, env, num_workers=2, timeout_s=TIMEOUT_S) as player:
        played = player.play(0, seeded_chunks, 0)
    assert 1 not in played.episodes and 1 <= len(played.episodes) <= 2
    assert played.lost_episodes == SIZE - len(played.episodes)


def test_a_round_without_an_episode_does_not_end_the_run(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path, f"toy-raise-{episode_seed(SEED, 1)}", size=1) as player:
        assert player.play(0, seeded_chunks, 0).episodes == (0,)
        lost = player.play(1, seeded_chunks, 0)
        assert player.play(2, seeded_chunks, 0).episodes == (2,)
    assert (lost.episodes, lost.env_steps, lost.lost_episodes) == ((), 0, 1)
    assert "success_rate" not in lost.metrics()
    assert read_round(tmp_path / "replay", 1) == lost


@pytest.mark.parametrize("size", [1, 4])
def test_an_environment_in_which_every_episode_is_lost_ends_the_run(tmp_path: pathlib.Path, size: int) -> None:
    with (
        player_of(tmp_path, "broken-toy", size=size) as player,
        pytest.raises(EnvError, match=r"the last 4 episodes in 'broken-toy' were all lost.*no physics today"),
    ):
        for number in range(10):
            player.play(number, seeded_chunks, 0)


def test_a_record_that_cannot_be_written_is_explained(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path) as player:
        (tmp_path / "replay" / "round-000000.json.tmp").mkdir()  # stands in for a disk that takes no more
        with pytest.raises(ReplayError, match=r"record of round 0 could not be written.*go on with --resume"):
            player.play(0, seeded_chunks, 0)
        (tmp_path / "replay" / "round-000000.json.tmp").rmdir()
        assert player.play(0, seeded_chunks, 0).episodes == (0, 1, 2)


@pytest.mark.parametrize("content", ["", '{"number": 0', "[]", '{"number": 0}'])
def test_a_damaged_record_is_named(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "round-000000.json").write_text(content)
    with pytest.raises(ReplayError, match=r"round-000000\.json is damaged .*--overwrite"):
        read_round(tmp_path, 0)
    [problem] = verify_rounds(tmp_path)
    assert "round-000000.json is damaged" in problem


def test_every_flipped_bit_of_a_record_is_found(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path) as player:
        player.play(0, seeded_chunks, 0)
    root = tmp_path / "replay"
    path = root / "round-000000.json"
    sound, rng = path.read_bytes(), np.random.default_rng(0)
    assert list(verify_rounds(root)) == []
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(ReplayError, match=r"round-000000\.json is damaged"):
            read_round(root, 0)
        assert len(list(verify_rounds(root))) == 1


def test_records_without_their_files_are_found(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path) as player:
        rounds = [player.play(number, seeded_chunks, 0) for number in range(3)]
    root = tmp_path / "replay"
    shard = root / f"episode-00000001-{rounds[0].lengths[1]}.npz"
    shard.rename(tmp_path / shard.name)
    [problem] = verify_rounds(root)
    assert f"{shard} is missing, but the record of round 0 names this episode" in problem
    (tmp_path / shard.name).rename(shard)
    (root / "round-000001.json").unlink()
    [problem] = verify_rounds(root)
    assert "round-000001.json is missing, but round-000002.json is there" in problem


def test_an_episode_of_another_length_than_its_record_says_is_named(tmp_path: pathlib.Path) -> None:
    with player_of(tmp_path) as player:
        played = player.play(0, seeded_chunks, 0)
    config, root = online_config(tmp_path), tmp_path / "replay"
    longer = dataclasses.replace(played, lengths=(played.lengths[0] + 1, *played.lengths[1:]))
    write_json_with_checksum(root / "round-000000.json", dataclasses.asdict(longer))
    assert "the record of round 0 names this episode" in next(verify_rounds(root))
    with EnvPool("toy", 1, num_workers=0, cameras=()) as envs, create_data_loader(config) as loader:
        replay = ReplayDataset(open_replay(tmp_path, config, envs.spec), config, loader.dataset)
        player = SynchronousPlayer(config, RoundPlayer(config, envs, replay.replay), None)
        message = rf"episode-00000000-{played.lengths[0]}\.npz: .* the record of round 0 says {longer.lengths[0]}"
        with pytest.raises(ReplayError, match=message):
            OnlinePhase(config, loader, replay, player).load_state_dict({"rounds": 1})


def test_an_episode_of_another_run_is_named(tmp_path: pathlib.Path) -> None:
    """The foreign episode has the same number and length, and its file is intact."""
    with player_of(tmp_path / "run") as player:
        played = player.play(0, seeded_chunks, 0)
    config, root = online_config(tmp_path / "run"), tmp_path / "run" / "replay"
    with EnvPool("toy", 1, num_workers=0, cameras=()) as envs, create_data_loader(config) as loader:
        mine, other = (open_replay(tmp_path / name, config, envs.spec) for name in ("run", "other"))
        other.write(0, mine.columns(0, list(mine.features)), "another task")
        shard = root / f"episode-00000000-{played.lengths[0]}.npz"
        shutil.copy(other.root / shard.name, shard)
        message = f"{shard} is not the file that round 0 wrote"
        [problem] = verify_rounds(root)
        assert problem.startswith(message) and played.checksums[0] in problem
        replay = ReplayDataset(open_replay(tmp_path / "run", config, envs.spec), config, loader.dataset)
        player = SynchronousPlayer(config, RoundPlayer(config, envs, replay.replay), None)
        with pytest.raises(ReplayError, match=message):
            OnlinePhase(config, loader, replay, player).load_state_dict({"rounds": 1})


@pytest.mark.parametrize(
    ("online", "judged", "expected"), [(2, 8, 2), (None, 8, 8), (None, None, 2)], ids=["online", "judged", "neither"]
)
def test_candidates_are_those_of_the_online_phase_then_those_of_evaluations(
    tmp_path: pathlib.Path, online: int | None, judged: int | None, expected: int
) -> None:
    config = online_config(tmp_path, online__best_of_n=online, evaluation__best_of_n=judged)
    assert config.acrlpd.num_action_samples == 2
    assert create_online_policy(config, None).best_of_n == expected


def test_online_rounds_explore_as_the_config_says(tmp_path: pathlib.Path) -> None:
    config = online_config(tmp_path, acrlpd__best_of_n__top_k=2)
    policy = create_online_policy(config, None)
    assert policy.exploration == config.acrlpd.best_of_n
    assert create_policy(policy.model, config, None).exploration is None  # evaluations take the best candidate
