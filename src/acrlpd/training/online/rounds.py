"""Rounds: whole episodes that one policy plays, written to the replay before the agent learns from them.

Everything about a round follows from the run's seed, the round's number and the policy. An episode is on disk as soon
as it is over, the record of a round as soon as all its episodes are. A run that was interrupted therefore takes the
rounds that are on disk instead of playing them again, and plays an unfinished round to the same end. Several runs of
one process, the members, may play their rounds together; the records are then written when the last round is over.
"""

import abc
import dataclasses
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

from acrlpd.agents import Agent
from acrlpd.checksums import stored_checksum
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.replay import Replay, shard_name
from acrlpd.data.sources.source import Feature
from acrlpd.envs import ChunkPolicy, EnvError, EnvPool, EnvSpec, Plan, Rollout, joint_rollouts, rollout_features
from acrlpd.envs.create import create_execution
from acrlpd.policies.acting_model import ActingModel, abstract_model, acting_model
from acrlpd.policies.policy import Policy, create_policy
from acrlpd.training.online.records import REPLAY, Round, read_round, write_round

REWARD, SUCCESS = "next.reward", "next.success"
# This many lost episodes in a row, without one that came to its end, stop the run.
_MAX_LOST_IN_A_ROW = 4


class Player(abc.ABC):
    """Where the rounds of an online phase come from: this process, or an actor process."""

    @abc.abstractmethod
    def update_policy(self, agent: Agent, step: int) -> None:
        """Called before every call of the train step with the newest agent."""

    @abc.abstractmethod
    def round(self, number: int) -> Round:
        """The round of this number; waits until it has been played to its end."""

    def finished_rounds(self, first: int) -> list[Round]:
        """The rounds from `first` on that are over, without waiting."""
        return []

    def updates_with_one_policy(self, step: int) -> int:
        """How many updates may follow `step` before `update_policy` must be called again."""
        return sys.maxsize

    def close(self) -> None:  # noqa: B027
        """Ends what the player has started."""


class SynchronousPlayer(Player):
    """Plays a round in this process when it is asked for one, with the policy of that moment."""

    def __init__(
        self, rl_config: RLTrainConfig, rounds: "RoundPlayer", norm_stats: Mapping[str, NormStats] | None
    ) -> None:
        self.rounds = rounds
        self.policy = create_online_policy(rl_config, norm_stats)  # without arrays
        self.step = 0
        self._agent: Agent
        self._average = rl_config.acts_with_average

    def update_policy(self, agent: Agent, step: int) -> None:
        self._agent, self.step = agent, step

    def model(self) -> ActingModel:
        """The newest model."""
        return acting_model(self._agent, average=self._average)

    def round(self, number: int) -> Round:
        return play_jointly({0: self}, {0: number}, num_runs=1)[0]


def play_jointly(
    players: Mapping[int, SynchronousPlayer], numbers: Mapping[int, int], num_runs: int
) -> dict[int, Round]:
    """The round `numbers[i]` of each given member i of `num_runs` runs, which share one pool of environments.

    The members play together, with one policy call for all of them. A member rests if it is not given, or if the
    record of its round is on disk. A round is the same whoever rests, because the number of runs stays.
    """
    rounds = {i: recorded for i, player in players.items() if (recorded := player.rounds.recorded(numbers[i]))}
    playing = {i: player for i, player in players.items() if i not in rounds}
    if playing:
        models = {i: player.model() for i, player in playing.items()}
        policy = next(iter(playing.values())).policy.with_models(models, num_runs)
        opened = {i: player.rounds.open(numbers[i], player.step) for i, player in playing.items()}
        rounds |= _play({i: player.rounds for i, player in playing.items()}, opened, policy, num_runs)
    return {i: rounds[i] for i in players}


@dataclasses.dataclass(frozen=True)
class _OpenRound:
    """A round that is being played."""

    number: int
    policy_step: int
    episodes: dict[int, int]  # seed of the environment -> number in the replay
    policy_seed: int
    on_disk: frozenset[int]  # episodes that were there before, because the round was interrupted


class RoundPlayer:
    """Plays the rounds of a run into its replay."""

    def __init__(self, rl_config: RLTrainConfig, envs: EnvPool, replay: Replay) -> None:
        self.envs = envs
        self.execution = create_execution(rl_config)
        self._replay = replay
        self._seed = rl_config.seed
        self._size = rl_config.online.episodes_per_round or rl_config.env.num_envs
        [self._action_column] = rl_config.data.repack.actions  # checked with the config: there is one column
        self._lost_in_a_row = 0
        self._firsts = [0]  # first episode of each round

    def play(self, number: int, policy: ChunkPolicy, policy_step: int) -> Round:
        """Plays a round to its end in all environments of the pool, unless its record is on disk."""
        recorded = self.recorded(number)
        return recorded or _play({0: self}, {0: self.open(number, policy_step)}, policy, num_runs=1)[0]

    def recorded(self, number: int) -> Round | None:
        """The round, if its record is on disk."""
        return read_round(self._replay.root, number)

    def open(self, number: int, policy_step: int) -> _OpenRound:
        """What is to be played in a round."""
        first = self._first_episode(number)
        episodes = {episode_seed(self._seed, first + i): first + i for i in range(self._size)}
        on_disk = frozenset(self._replay.scan())
        return _OpenRound(number, policy_step, episodes, policy_seed(self._seed, number), on_disk)

    def write(self, opened: _OpenRound, rollout: Rollout) -> None:
        """Writes an episode that is over, unless the episode is on disk from before an interruption."""
        episode = opened.episodes[rollout.seed]
        if episode not in opened.on_disk:
            self._replay.write(episode, rollout.columns(self._action_column), rollout.prompt)

    def end(self, opened: _OpenRound) -> Round:
        """Writes the record of a round whose episodes are all over."""
        played = self._record(opened.number, opened.policy_step)
        self._give_up_on(played)
        write_round(self._replay.root, played)
        return played

    def _first_episode(self, number: int) -> int:
        """The first episode after those of the rounds before, which may have had another size in an earlier process."""
        while len(self._firsts) <= number:
            before = read_round(self._replay.root, len(self._firsts) - 1)
            size = self._size if before is None else len(before.episodes) + before.lost_episodes
            self._firsts.append(self._firsts[-1] + size)
        return self._firsts[number]

    def _record(self, number: int, policy_step: int) -> Round:
        """The record of a round that is over, from what is on disk."""
        on_disk = set(self._replay.scan())
        first = self._first_episode(number)
        episodes = [i for i in range(first, first + self._size) if i in on_disk]
        lived = [self._replay.columns(i, (REWARD, SUCCESS)) for i in episodes]
        lengths = [len(columns[REWARD]) for columns in lived]
        shards = [self._replay.root / shard_name(*episode) for episode in zip(episodes, lengths, strict=True)]
        return Round(
            number=number,
            episodes=tuple(episodes),
            lengths=tuple(lengths),
            checksums=tuple(map(stored_checksum, shards)),
            successes=tuple(bool(columns[SUCCESS].any()) for columns in lived),
            returns=tuple(float(columns[REWARD].sum(dtype=np.float64)) for columns in lived),
            lost_episodes=self._size - len(episodes),
            policy_step=policy_step,
        )

    def _give_up_on(self, played: Round) -> None:
        """Stops the run when too many episodes in a row were lost; a single lost episode is only counted."""
        self._lost_in_a_row = 0 if played.episodes else self._lost_in_a_row + played.lost_episodes
        if self._lost_in_a_row >= _MAX_LOST_IN_A_ROW:
            raise EnvError(
                f"the last {self._lost_in_a_row} episodes in {self.envs.name!r} were all lost, up to round "
                f"{played.number}; the last one: {self.envs.failures[-1].reason}"
            )


def _play(
    players: Mapping[int, RoundPlayer], rounds: Mapping[int, _OpenRound], policy: ChunkPolicy, num_runs: int
) -> dict[int, Round]:
    """Plays one round of each given member to its end; every episode is on disk as soon as it is over.

    Episodes that are on disk already, from before an interruption, stay as they are. They are played once more all the
    same: the actions of the others are the same to the last bit only in the same batches.
    """
    plans = {i: Plan(opened.episodes, opened.policy_seed) for i, opened in rounds.items()}
    some_player = next(iter(players.values()))  # pool and execution are the same for all members
    for i, rollout in joint_rollouts(
        some_player.envs,
        policy,
        [plans.get(i) for i in range(num_runs)],
        execution=some_player.execution,
        record=True,
    ):
        players[i].write(rounds[i], rollout)
    return {i: players[i].end(opened) for i, opened in rounds.items()}


def create_online_policy(rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None) -> Policy:
    """The policy of an online phase: it explores as the config says, with online.best_of_n candidates.

    Its model has shapes in place of arrays until a model is put in its place.
    """
    model, best_of_n = abstract_model(rl_config), rl_config.online.best_of_n
    return create_policy(model, rl_config, norm_stats, best_of_n=best_of_n, explore=True)


def open_replay(directory: pathlib.Path, rl_config: RLTrainConfig, spec: EnvSpec) -> Replay:
    """The replay of the run in `directory`, with the columns of its environment."""
    return Replay(directory / REPLAY, replay_features(rl_config, spec), spec.fps)


def replay_features(rl_config: RLTrainConfig, spec: EnvSpec) -> dict[str, Feature]:
    """The columns and cameras of episodes in a replay; actions are in the dataset's column."""
    [action_column] = rl_config.data.repack.actions
    return rollout_features(dataclasses.replace(spec, action_column=action_column), rl_config.noise_dim)


def episode_seed(seed: int, episode: int) -> int:
    """The environment's seed of an episode: far from those of evaluations, which count up from evaluation.seed."""
    return int(np.random.SeedSequence([seed, 0, episode]).generate_state(1)[0] | 0x4000_0000) & 0x7FFF_FFFF


def policy_seed(seed: int, number: int) -> int:
    """The seed of the policy's noise in a round."""
    return int(np.random.SeedSequence([seed, 1, number]).generate_state(1)[0])
