"""The online phase, in rounds: whole episodes that one policy plays, written to the replay before the agent learns.

Everything about a round follows from the run's seed, the round's number and the policy. An episode is on disk as soon
as it is over, the record of a round as soon as all its episodes are. A run that was interrupted therefore takes the
rounds that are on disk instead of playing them again, and plays an unfinished round to the same end.
"""

import abc
import dataclasses
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from acrlpd.agents import Agent
from acrlpd.checksums import is_intact, read_json_with_checksum, stored_checksum, write_json_with_checksum
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.replay import RESTORE, Replay, ReplayDataset, ReplayError, shard_name
from acrlpd.envs import ChunkPolicy, EnvError, EnvPool, EnvSpec, rollout_features, rollouts
from acrlpd.envs.create import create_execution
from acrlpd.policies.acting_model import abstract_model, acting_model
from acrlpd.policies.policy import Policy, create_policy

REPLAY = "replay"
REWARD, SUCCESS = "next.reward", "next.success"
# This many lost episodes in a row, without one that came to its end, stop the run.
_MAX_LOST_IN_A_ROW = 4


@dataclasses.dataclass(frozen=True)
class Round:
    """The result of a round, episode by episode in the order of their numbers."""

    number: int
    episodes: tuple[int, ...]  # their numbers in the replay, without the lost episodes
    lengths: tuple[int, ...]
    checksums: tuple[str, ...]  # of their shards
    successes: tuple[bool, ...]
    returns: tuple[float, ...]  # sums of the environment's own rewards
    lost_episodes: int  # to crashes and time-outs of the environment
    policy_step: int  # updates of the policy that played

    @property
    def env_steps(self) -> int:
        return sum(self.lengths)

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run."""
        metrics = {
            "episodes": float(len(self.episodes)),
            "lost_episodes": float(self.lost_episodes),
            "policy_step": float(self.policy_step),
        }
        if self.episodes:
            metrics |= {
                "success_rate": float(np.mean(self.successes)),
                "episode_reward_mean": float(np.mean(self.returns)),
                "episode_length_mean": float(np.mean(self.lengths)),
            }
        return metrics


class Player(abc.ABC):
    """Where the rounds of an online phase come from: this process, or an actor process."""

    @abc.abstractmethod
    def update_policy(self, agent: Agent, step: int) -> None:
        """Called before every call of the train step with the newest policy."""

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
        self._rl_config = rl_config
        self._rounds = rounds
        self._policy = create_online_policy(rl_config, norm_stats)
        self._agent: Agent
        self._step = 0

    def update_policy(self, agent: Agent, step: int) -> None:
        self._agent, self._step = agent, step

    def round(self, number: int) -> Round:
        model = acting_model(self._agent, average=self._rl_config.acts_with_average)
        return self._rounds.play(number, dataclasses.replace(self._policy, model=model), self._step)


class OnlinePhase:
    """Keeps the replay as large as the update-to-data ratio asks for, and tells the loader about new episodes.

    Updates count from the beginning of the phase. Rounds are taken in order. When this process plays them, what an
    update sees therefore depends on the run's config alone.
    """

    def __init__(self, rl_config: RLTrainConfig, loader: DataLoader, replay: ReplayDataset, player: Player) -> None:
        self.totals = Counter(env_steps=0, episodes=0, successes=0, lost_episodes=0)
        self._rounds = 0
        self._config = rl_config.online
        self._bc_weight = rl_config.acrlpd.loss_weights.bc_weight
        self._loader = loader
        self._replay = replay
        self._player = player

    def prepare(self, agent: Agent, step: int, update: int) -> list[dict[str, float]]:
        """Takes the rounds that the next update needs; returns the metrics of the new rounds."""
        self._player.update_policy(agent, step)
        rounds = self._player.finished_rounds(self._rounds)
        while self.totals["env_steps"] + sum(played.env_steps for played in rounds) < self._wanted_steps(update):
            rounds.append(self._player.round(self._rounds + len(rounds)))
        return self._take(rounds)

    def needs_round(self, update: int) -> bool:
        """Whether the update needs more environment steps than the rounds so far have."""
        return self.totals["env_steps"] < self._wanted_steps(update)

    def updates_ahead(self, step: int, update: int) -> int:
        """How many updates may follow before `prepare` must be called again: for a round, or for a newer policy.

        `step` counts the updates of the run so far, and `update` those of the phase.
        """
        spare = self.totals["env_steps"] - self._config.start_steps
        # Rounding may make the first guess too large by one.
        last = max(update, int(spare * self._config.update_to_data_ratio) + 1)
        while last > update and self.needs_round(last):
            last -= 1
        return min(last - update + 1, self._player.updates_with_one_policy(step))

    def _wanted_steps(self, update: int) -> int:
        """The environment steps that must have been made before an update."""
        return self._config.start_steps + math.ceil(update / self._config.update_to_data_ratio)

    def bc_weight(self, update: int) -> float:
        """The weight of cloning at an update, on its way from the offline value to the final value."""
        final, decay = self._config.final_bc_weight, self._config.bc_weight_decay_steps
        if final is None:
            return self._bc_weight
        share = min(update / decay, 1.0) if decay else 1.0
        return self._bc_weight + share * (final - self._bc_weight)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the rounds that the interrupted run had taken, which are all on disk."""
        rounds = read_rounds(self._replay.replay.root, 0)[: state["rounds"]]
        if len(rounds) < state["rounds"]:
            raise FileNotFoundError(
                f"{self._replay.replay.root}: the record of round {len(rounds)} is missing, and the checkpoint has "
                "learned from this round; restore the replay or start the run again with --overwrite"
            )
        self._take(rounds)

    def close(self) -> None:
        self._player.close()
        self._loader.close()  # before the replay, because the loader's threads read from it
        self._replay.close()

    def _take(self, rounds: Sequence[Round]) -> list[dict[str, float]]:
        """Adds rounds to the replay and, from the next batch on, to the batches; returns their metrics."""
        metrics = []
        for played in rounds:
            self._rounds += 1
            self.totals.update(
                env_steps=played.env_steps,
                episodes=len(played.episodes),
                successes=sum(played.successes),
                lost_episodes=played.lost_episodes,
            )
            totals = {"env_steps": self.totals["env_steps"], "total_episodes": self.totals["episodes"]}
            metrics.append(played.metrics() | {name: float(total) for name, total in totals.items()})
        episodes = [number for played in rounds for number in played.episodes]
        if episodes:
            dataset = self._replay.admit(episodes)
            for played in rounds:
                self._check_episodes(played)
            self._loader.mix_replay(dataset, self._config.offline_ratio)
        return metrics

    def _check_episodes(self, played: Round) -> None:
        """Refuses episodes that are not those of which the record of their round tells."""
        replay = self._replay.replay
        lengths = dict(zip(replay.indices, replay.lengths.tolist(), strict=True))
        for number, length in zip(played.episodes, played.lengths, strict=True):
            if lengths[number] != length:
                raise ReplayError(
                    f"{replay.root / shard_name(number, lengths[number])}: the episode has {lengths[number]} steps, "
                    f"the record of round {played.number} says {length}; {RESTORE}"
                )
        for problem in _episode_problems(replay.root, played):
            raise ReplayError(problem)


class RoundPlayer:
    """Plays the rounds of a run into its replay."""

    def __init__(self, rl_config: RLTrainConfig, envs: EnvPool, replay: Replay) -> None:
        self._envs = envs
        self._replay = replay
        self._execution = create_execution(rl_config)
        self._seed = rl_config.seed
        self._size = rl_config.online.episodes_per_round or rl_config.env.num_envs
        [self._action_column] = rl_config.data.repack.actions  # checked with the config: there is one column
        self._lost_in_a_row = 0
        self._firsts = [0]  # first episode of each round

    def play(self, number: int, policy: ChunkPolicy, policy_step: int) -> Round:
        """Plays a round to its end, unless its record is on disk; every episode is on disk as soon as it is over.

        Episodes that are on disk already, from before an interruption, stay as they are. They are played once more
        all the same: the actions of the others are the same to the last bit only in the same batches.
        """
        recorded = read_round(self._replay.root, number)
        if recorded is not None:
            return recorded
        first = self._first_episode(number)
        seeds = {episode_seed(self._seed, first + i): first + i for i in range(self._size)}
        on_disk = set(self._replay.scan())
        for rollout in rollouts(
            self._envs,
            policy,
            seeds,
            execution=self._execution,
            policy_seed=policy_seed(self._seed, number),
            record=True,
        ):
            episode = seeds[rollout.seed]
            if episode not in on_disk:
                self._replay.write(episode, rollout.columns(self._action_column), rollout.prompt)
        played = self._record(number, policy_step)
        self._give_up_on(played)
        try:
            write_json_with_checksum(_round_file(self._replay.root, number), dataclasses.asdict(played))
        except OSError as error:
            raise ReplayError(
                f"{self._replay.root}: the record of round {number} could not be written ({error.strerror or error}). "
                "Its episodes are complete; free some space and go on with --resume"
            ) from error
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
                f"the last {self._lost_in_a_row} episodes in {self._envs.name!r} were all lost, up to round "
                f"{played.number}; the last one: {self._envs.failures[-1].reason}"
            )


def create_online_policy(rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None) -> Policy:
    """The policy of an online phase: it explores as the config says, with online.best_of_n candidates.

    Its model has shapes in place of arrays until a model is put in its place.
    """
    model, best_of_n = abstract_model(rl_config), rl_config.online.best_of_n
    return create_policy(model, rl_config, norm_stats, best_of_n=best_of_n, explore=True)


def open_replay(directory: pathlib.Path, rl_config: RLTrainConfig, spec: EnvSpec) -> Replay:
    """The replay of the run in `directory`, with the columns of its environment."""
    [action_column] = rl_config.data.repack.actions
    features = rollout_features(dataclasses.replace(spec, action_column=action_column))
    return Replay(directory / REPLAY, features, spec.fps)


def read_round(directory: pathlib.Path, number: int) -> Round | None:
    """The record of a round that was played to its end; None if the round has no record."""
    path = _round_file(directory, number)
    if not path.exists():
        return None
    try:
        content = read_json_with_checksum(path)
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        return Round(**fields)
    except (ValueError, TypeError) as error:
        raise ReplayError(f"{path} is damaged ({error}); {RESTORE}") from error


def read_rounds(directory: pathlib.Path, first: int) -> list[Round]:
    """The records of the rounds from `first` on that are on disk now, up to the first missing round."""
    rounds: list[Round] = []
    while (played := read_round(directory, first + len(rounds))) is not None:
        rounds.append(played)
    return rounds


def verify_rounds(directory: pathlib.Path) -> Iterator[str]:
    """What is wrong with the records of rounds in the replay in `directory`, with the name of the file.

    A record is sound if its checksum fits, no record before it is missing, and its episodes are on disk.
    """
    for expected, path in enumerate(sorted(directory.glob("round-*.json"))):
        if path != _round_file(directory, expected):
            yield f"{_round_file(directory, expected)} is missing, but {path.name} is there; {RESTORE}"
            return
        try:
            played = read_round(directory, expected)
        except ReplayError as error:
            yield str(error)
            continue
        assert played is not None, "the file is there"
        yield from _episode_problems(directory, played)


def _episode_problems(directory: pathlib.Path, played: Round) -> Iterator[str]:
    """Which episodes of a round are not on disk: their file is missing, or it is an intact file of another episode.

    A damaged file is named where it is read.
    """
    for number, length, checksum in zip(played.episodes, played.lengths, played.checksums, strict=True):
        shard = directory / shard_name(number, length)
        if not shard.is_file():
            yield f"{shard} is missing, but the record of round {played.number} names this episode; {RESTORE}"
        elif (found := stored_checksum(shard)) != checksum and is_intact(shard):
            yield (
                f"{shard} is not the file that round {played.number} wrote: its checksum is {found}, the record of the "
                f"round says {checksum}; {RESTORE}"
            )


def _round_file(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"round-{number:06d}.json"


def episode_seed(seed: int, episode: int) -> int:
    """The environment's seed of an episode: far from those of evaluations, which count up from evaluation.seed."""
    return int(np.random.SeedSequence([seed, 0, episode]).generate_state(1)[0] | 0x4000_0000) & 0x7FFF_FFFF


def policy_seed(seed: int, number: int) -> int:
    """The seed of the policy's noise in a round."""
    return int(np.random.SeedSequence([seed, 1, number]).generate_state(1)[0])
