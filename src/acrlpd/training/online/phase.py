"""What the online phase adds to the training loop: episodes by the current policy, mixed into the batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.data.pipeline.replay import Replay, ReplayDataset
from acrlpd.envs.rollouts import ChunkPolicy
from acrlpd.training.online.rounds import Round, RoundPlayer, read_round


class Player(Protocol):
    """Whoever plays rounds: this process when asked, or an actor process all the time."""

    def update_policy(self, agent: Agent, step: int) -> None:
        """Called before every update with the newest policy."""

    def round(self, number: int) -> Round:
        """Waits for a round to be played to its end."""

    def finished_rounds(self, first: int) -> list[Round]:
        """The rounds from `first` on that can be had without waiting."""

    def close(self) -> None: ...


class OnlinePhase:
    """Keeps the replay as large as the update-to-data ratio asks for, and the loader informed.

    Counts updates from the beginning of the phase. Rounds are taken in order, so what an update sees
    depends on the run's config alone when this process plays them.
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
        """Brings in what the next update needs; returns the metrics of the rounds that are new."""
        self._player.update_policy(agent, step)
        wanted = self._config.start_steps + math.ceil(update / self._config.update_to_data_ratio)
        rounds = self._player.finished_rounds(self._rounds)
        while self.env_steps + sum(played.env_steps for played in rounds) < wanted:
            rounds.append(self._player.round(self._rounds + len(rounds)))
        return self._take(rounds)

    def bc_weight(self, update: int) -> float:
        """Weight of cloning at an update: from its offline value to the final one."""
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
        """Takes the rounds that the interrupted run had taken; they are all on disk."""
        rounds = []
        for number in range(self._rounds, state["rounds"]):
            played = read_round(self._replay.replay.root, number)
            if played is None:
                raise FileNotFoundError(
                    f"{self._replay.replay.root}: the record of round {number} is missing, of which the checkpoint "
                    "has learned; restore the replay or start the run again with --overwrite"
                )
            rounds.append(played)
        self._take(rounds)

    def close(self) -> None:
        self._player.close()
        self._loader.close()  # its threads read from the replay
        self._replay.close()

    def _take(self, rounds: Sequence[Round]) -> list[dict[str, float]]:
        """Adds rounds to the replay and, from the next batch on, to the batches; their metrics."""
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
    """Plays a round in this process when it is asked for one, with the policy as it is then."""

    def __init__(self, player: RoundPlayer, replay: Replay, policy_of: Callable[[Agent], ChunkPolicy]) -> None:
        self._player = player
        self._replay = replay
        self._policy_of = policy_of
        self._agent: Agent | None = None
        self._step = 0

    def update_policy(self, agent: Agent, step: int) -> None:
        self._agent, self._step = agent, step

    def round(self, number: int) -> Round:
        assert self._agent is not None
        found = read_round(self._replay.root, number)
        return found or self._player.play(number, self._policy_of(self._agent), self._step)

    def finished_rounds(self, first: int) -> list[Round]:
        return []

    def close(self) -> None:
        pass
