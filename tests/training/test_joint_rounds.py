"""Rounds of several runs that play together: each run has the rounds that it would have alone."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from test_rounds import files_of
from toy_env import seeded_chunks
from training_helpers import online_config

from acrlpd.agents import Agent
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.data.pipeline.replay import Replay, ReplayDataset
from acrlpd.envs import EnvPool
from acrlpd.training.online.phase import OnlinePhase
from acrlpd.training.online.records import Round, read_round
from acrlpd.training.online.rounds import (
    Player,
    RoundPlayer,
    SynchronousPlayer,
    open_replay,
    play_jointly,
)

NUM_RUNS, NUM_ENVS, SIZE, STEP = 3, 2, 3, 40


@pytest.fixture(scope="module")
def agents() -> list[Agent]:
    config = online_config(pathlib.Path("nowhere"))
    create = jax.jit(lambda key: create_agent(config, key))
    return [create(jax.random.key(seed)) for seed in range(NUM_RUNS)]


@pytest.fixture(scope="module")
def envs() -> Iterator[EnvPool]:
    with EnvPool("toy", NUM_RUNS * NUM_ENVS, num_workers=0, cameras=()) as pool:
        yield pool


def player_of(directory: pathlib.Path, member: int, envs: EnvPool, agent: Agent | None) -> SynchronousPlayer:
    """The player of one member; with None for an agent, the player must not need one."""
    directory = directory / str(member)
    config = online_config(directory, seed=member, online__episodes_per_round=SIZE)
    player = SynchronousPlayer(config, RoundPlayer(config, envs, open_replay(directory, config, envs.spec)), None)
    player.update_policy(agent, STEP + member)  # type: ignore[arg-type]
    return player


def play(directory: pathlib.Path, members: list[int], envs: EnvPool, agents: list[Agent]) -> dict[int, Round]:
    players = {i: player_of(directory, i, envs, agents[i]) for i in members}
    return play_jointly(players, dict.fromkeys(members, 0), NUM_RUNS)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, envs: EnvPool, agents: list[Agent]) -> pathlib.Path:
    """A directory with the first rounds of all members."""
    directory = tmp_path_factory.mktemp("together")
    rounds = play(directory, [0, 1, 2], envs, agents)
    assert rounds == {i: read_round(directory / str(i) / "replay", 0) for i in range(NUM_RUNS)}
    return directory


def test_every_member_has_the_round_that_it_has_alone(
    together: pathlib.Path, agents: list[Agent], tmp_path: pathlib.Path
) -> None:
    for member in range(NUM_RUNS):
        with EnvPool("toy", NUM_ENVS, num_workers=0, cameras=()) as envs:
            alone = player_of(tmp_path, member, envs, agents[member]).round(0)
        found = read_round(together / str(member) / "replay", 0)
        assert found is not None and found.policy_step == STEP + member
        for field in ("episodes", "lengths", "successes", "lost_episodes", "policy_step"):
            assert getattr(found, field) == getattr(alone, field), field
        for episode, length in zip(alone.episodes, alone.lengths, strict=True):
            name = f"{member}/replay/episode-{episode:08d}-{length}.npz"
            with np.load(together / name) as mine, np.load(tmp_path / name) as other:
                for column in ("column/observation.state", "column/action", "column/next.reward"):
                    np.testing.assert_allclose(mine[column], other[column], atol=1e-4, err_msg=column)


def test_a_round_is_the_same_whoever_rests(
    together: pathlib.Path, envs: EnvPool, agents: list[Agent], tmp_path: pathlib.Path
) -> None:
    """To the last bit: member 2 rests because its record is on disk, member 0 because nobody asked for its round."""
    replay = tmp_path / "2" / "replay"
    replay.mkdir(parents=True)
    for name, content in files_of(together / "2").items():
        (replay / name).write_bytes(content)
    players = {1: player_of(tmp_path, 1, envs, agents[1]), 2: player_of(tmp_path, 2, envs, None)}
    rounds = play_jointly(players, {1: 0, 2: 0}, NUM_RUNS)
    assert rounds == {i: read_round(together / str(i) / "replay", 0) for i in (1, 2)}
    assert files_of(tmp_path / "1") == files_of(together / "1")
    assert not (tmp_path / "0").exists()
    again = {i: player_of(tmp_path, i, envs, None) for i in (1, 2)}
    assert play_jointly(again, {1: 0, 2: 0}, NUM_RUNS) == rounds  # all on disk: no agent is asked for


def test_interrupted_rounds_come_to_the_same_end(
    together: pathlib.Path, envs: EnvPool, agents: list[Agent], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = Replay.write, []

    def dies_at_the_third(self: Replay, *args: Any) -> None:
        written.append(self.root)
        if len(written) == 3:
            raise KeyboardInterrupt
        write(self, *args)

    monkeypatch.setattr(Replay, "write", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, [0, 1, 2], envs, agents)
    monkeypatch.setattr(Replay, "write", write)
    assert len(list(tmp_path.glob("*/replay/*"))) == 2
    play(tmp_path, [0, 1, 2], envs, agents)
    for member in range(NUM_RUNS):
        assert files_of(tmp_path / str(member)) == files_of(together / str(member))


class OneRoundAhead(Player):
    """Has played the first round before the learner asks for it, as an actor process may have."""

    def __init__(self, rounds: RoundPlayer) -> None:
        self.rounds = rounds

    def update_policy(self, agent: Any, step: int) -> None:
        self.step = step

    def round(self, number: int) -> Round:
        return self.rounds.play(number, seeded_chunks, self.step)

    def finished_rounds(self, first: int) -> list[Round]:
        return [self.round(0)] if first == 0 else []


def test_the_phase_asks_for_the_rounds_that_an_update_needs(tmp_path: pathlib.Path) -> None:
    config = online_config(
        tmp_path, online__episodes_per_round=SIZE, online__start_steps=10, online__update_to_data_ratio=1.0
    )
    with EnvPool("toy", NUM_ENVS, num_workers=0, cameras=()) as envs, create_data_loader(config) as loader:
        replay = ReplayDataset(open_replay(tmp_path, config, envs.spec), config, loader.dataset)
        phase = OnlinePhase(config, loader, replay, OneRoundAhead(RoundPlayer(config, envs, replay.replay)))
        assert phase.needs_round(0)
        phase.begin(None, 7)  # type: ignore[arg-type]  # the player needs no agent
        assert phase.missing_round(0) is None  # three episodes have at least 12 steps
        assert phase.totals["env_steps"] == 0  # nothing is taken yet
        asked = []
        while (number := phase.missing_round(60)) is not None:
            asked.append(number)
            phase.add(phase.player.round(number))
        metrics = phase.take()
        assert asked == list(range(1, len(metrics))) and len(asked) >= 1
        assert [line["episodes"] for line in metrics] == [SIZE] * len(metrics)
        assert phase.totals["env_steps"] == metrics[-1]["env_steps"] >= 70 > metrics[-2]["env_steps"]
        assert phase.state_dict() == {"rounds": len(metrics)}
        assert len(replay.replay.indices) == SIZE * len(metrics)
        assert phase.take() == []
        resumed = ReplayDataset(open_replay(tmp_path, config, envs.spec), config, loader.dataset)
        again = OnlinePhase(config, loader, resumed, phase.player)
        again.load_state_dict(phase.state_dict())
        assert again.totals == phase.totals and again.missing_round(60) is None
