"""What the online phase adds to the training loop: episodes of the current policy in the batches."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.data.pipeline.replay import ReplayDataset
from acrlpd.training.online.rounds import Player, Round, read_rounds


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
        wanted = self._config.start_steps + math.ceil(update / self._config.update_to_data_ratio)
        rounds = self._player.finished_rounds(self._rounds)
        while self.totals["env_steps"] + sum(played.env_steps for played in rounds) < wanted:
            rounds.append(self._player.round(self._rounds + len(rounds)))
        return self._take(rounds)

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
            self._loader.mix_replay(self._replay.admit(episodes), self._config.offline_ratio)
        return metrics
