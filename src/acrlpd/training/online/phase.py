"""What the online phase adds to the training loop: episodes of the current policy in the batches."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.replay import Replay, ReplayDataset
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.policy import Policy
from acrlpd.training.online.rounds import Round, RoundPlayer, create_online_policy, read_round


class Player(Protocol):
    """Plays rounds: in this process when it is asked, or in an actor process all the time."""

    def update_policy(self, agent: Agent, step: int) -> None:
        """Called before every update with the newest policy."""

    def round(self, number: int) -> Round:
        """The round of this number; waits until it has been played to its end."""

    def finished_rounds(self, first: int) -> list[Round]:
        """The rounds from `first` on that are over, without waiting."""

    def close(self) -> None: ...


class OnlinePhase:
    """Keeps the replay as large as the update-to-data ratio asks for, and tells the loader about new episodes.

    Updates count from the beginning of the phase. Rounds are taken in order. When this process plays them, what an
    update sees therefore depends on the run's config alone.
    """

    def __init__(self, rl_config: RLTrainConfig, loader: DataLoader, replay: ReplayDataset, player: Player) -> None:
        self.env_steps = 0
        self.num_episodes = 0
        self.num_successes = 0
        self.num_lost_episodes = 0
        self._rounds = 0
        self._config = rl_config.online
        self._bc_weight = rl_config.acrlpd.loss_weights.bc_weight
        self._loader = loader
        self._replay = replay
        self._player = player

    def prepare(self, agent: Agent, step: int, update: int) -> list[dict[str, float]]:
        """Takes the rounds that the next update needs; returns the metrics of the new rounds."""
        self._player.update_policy(agent, step)
        wanted = self._config.start_steps + math.ceil(update / self._config.update_to_data_ratio)
        rounds = self._player.finished_rounds(self._rounds)
        while self.env_steps + sum(played.env_steps for played in rounds) < wanted:
            rounds.append(self._player.round(self._rounds + len(rounds)))
        return self._take(rounds)

    def bc_weight(self, update: int) -> float:
        """The weight of cloning at an update, on its way from the offline value to the final value."""
        final, decay = self._config.final_bc_weight, self._config.bc_weight_decay_steps
        if final is None:
            return self._bc_weight
        share = min(update / decay, 1.0) if decay else 1.0
        return self._bc_weight + share * (final - self._bc_weight)

    def summary(self) -> dict[str, int]:
        return {
            "env_steps": self.env_steps,
            "episodes": self.num_episodes,
            "successes": self.num_successes,
            "lost_episodes": self.num_lost_episodes,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the rounds that the interrupted run had taken, which are all on disk."""
        rounds = []
        for number in range(self._rounds, state["rounds"]):
            played = read_round(self._replay.replay.root, number)
            if played is None:
                raise FileNotFoundError(
                    f"{self._replay.replay.root}: the record of round {number} is missing, and the checkpoint has "
                    "learned from this round; restore the replay or start the run again with --overwrite"
                )
            rounds.append(played)
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
            self.env_steps += played.env_steps
            self.num_episodes += len(played.episodes)
            self.num_successes += sum(played.successes)
            self.num_lost_episodes += played.lost_episodes
            totals = {"env_steps": float(self.env_steps), "total_episodes": float(self.num_episodes)}
            metrics.append(played.metrics() | totals)
        episodes = [number for played in rounds for number in played.episodes]
        if episodes:
            self._loader.mix_replay(self._replay.admit(episodes), self._config.offline_ratio)
        return metrics


class SynchronousPlayer:
    """Plays a round in this process when it is asked for one, with the policy of that moment."""

    def __init__(
        self, rl_config: RLTrainConfig, player: RoundPlayer, replay: Replay, norm_stats: Mapping[str, NormStats] | None
    ) -> None:
        self._rl_config = rl_config
        self._player = player
        self._replay = replay
        self._norm_stats = norm_stats
        self._policy: Policy | None = None  # of the round before; its transforms serve all rounds
        self._agent: Agent | None = None
        self._step = 0

    def update_policy(self, agent: Agent, step: int) -> None:
        self._agent, self._step = agent, step

    def round(self, number: int) -> Round:
        found = read_round(self._replay.root, number)
        return found or self._player.play(number, self._newest_policy(), self._step)

    def _newest_policy(self) -> Policy:
        assert self._agent is not None
        model = acting_model(self._agent, self._rl_config)
        if self._policy is None:
            self._policy = create_online_policy(model, self._rl_config, self._norm_stats)
        self._policy = dataclasses.replace(self._policy, model=model)
        return self._policy

    def finished_rounds(self, first: int) -> list[Round]:
        return []

    def close(self) -> None:
        pass
