"""Rounds: a few whole episodes played with one policy, kept in the replay before anybody learns from them.

Everything about a round follows from the run's seed, the round's number and the policy. Its episodes are on
disk as soon as each is over, its record when all are. So a run that was interrupted takes the rounds that
are there instead of playing them again, and plays one that was cut off to the same end.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.data.replay import Replay
from acrlpd.data.source import Feature
from acrlpd.envs.env import EnvSpec
from acrlpd.envs.episodes import rollout_features
from acrlpd.envs.errors import EnvError
from acrlpd.envs.pool import EnvPool
from acrlpd.envs.rollouts import ChunkPolicy, rollouts

REPLAY = "replay"


@dataclasses.dataclass(frozen=True)
class Round:
    """What came of a round, episode by episode in the order of their numbers."""

    number: int
    episodes: tuple[int, ...]  # their numbers in the replay; one that was lost is missing
    lengths: tuple[int, ...]
    successes: tuple[bool, ...]
    returns: tuple[float, ...]  # of the environment's own reward
    policy_step: int  # updates of the policy that played

    @property
    def env_steps(self) -> int:
        return sum(self.lengths)

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run."""
        return {
            "episodes": float(len(self.episodes)),
            "success_rate": float(np.mean(self.successes)),
            "episode_reward_mean": float(np.mean(self.returns)),
            "episode_length_mean": float(np.mean(self.lengths)),
            "policy_step": float(self.policy_step),
        }


class RoundPlayer:
    """Plays the rounds of a run into its replay."""

    def __init__(self, rl_config: RLTrainConfig, envs: EnvPool, replay: Replay, replan_steps: int) -> None:
        self._envs = envs
        self._replay = replay
        self._replan_steps = replan_steps
        self._seed = rl_config.seed
        self._size = episodes_per_round(rl_config)
        self._action_column = action_column(rl_config)

    def play(self, number: int, policy: ChunkPolicy, policy_step: int) -> Round:
        """Plays a round to its end; every episode is safe as soon as it is over."""
        first = number * self._size
        seeds = {_episode_seed(self._seed, first + i): first + i for i in range(self._size)}
        episodes: dict[int, tuple[int, bool, float]] = {}
        on_disk = set(self._replay.scan())
        for rollout in rollouts(
            self._envs,
            policy,
            seeds,
            replan_steps=self._replan_steps,
            policy_seed=_policy_seed(self._seed, number),
            record=True,
        ):
            episode = seeds[rollout.seed]
            if episode not in on_disk:  # from before an interruption
                self._replay.write(episode, rollout.columns(self._action_column), rollout.prompt)
            total = float(rollout.rewards.sum(dtype=np.float64))
            episodes[episode] = rollout.length, rollout.succeeded, total
        if not episodes:
            raise EnvError(
                f"all {self._size} episodes of round {number} in {self._envs.name!r} were lost; the last: "
                f"{self._envs.failures[-1].reason}"
            )
        order = sorted(episodes)
        lengths, successes, returns = zip(*(episodes[i] for i in order), strict=True)
        played = Round(number, tuple(order), lengths, successes, returns, policy_step)
        write_round(self._replay.root, played)
        return played


def episodes_per_round(rl_config: RLTrainConfig) -> int:
    return rl_config.online.episodes_per_round or rl_config.env.num_envs


def action_column(rl_config: RLTrainConfig) -> str:
    """The column of the dataset that holds what an environment executes."""
    names = rl_config.data.repack.actions
    if len(names) != 1:
        raise ConfigError(
            f"an online phase needs actions in one column of the dataset; data.repack.actions names {len(names)}: "
            f"{', '.join(names)}"
        )
    return names[0]


def open_replay(directory: pathlib.Path, rl_config: RLTrainConfig, spec: EnvSpec) -> Replay:
    """The replay of the run in `directory`, with the columns of its environment."""
    features: Mapping[str, Feature] = rollout_features(
        dataclasses.replace(spec, action_column=action_column(rl_config))
    )
    return Replay(directory / REPLAY, features, spec.fps)


def write_round(directory: pathlib.Path, played: Round) -> None:
    path = _round_file(directory, played.number)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(played)))
    temporary.replace(path)


def read_round(directory: pathlib.Path, number: int) -> Round | None:
    """The record of a round that was played to its end; None if there is none."""
    path = _round_file(directory, number)
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    return Round(**fields)


def _round_file(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"round-{number:06d}.json"


def _episode_seed(seed: int, episode: int) -> int:
    """Far from the seeds of evaluations, which count up from evaluation.seed."""
    return int(np.random.SeedSequence([seed, 0, episode]).generate_state(1)[0] | 0x4000_0000) & 0x7FFF_FFFF


def _policy_seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, 1, number]).generate_state(1)[0])
