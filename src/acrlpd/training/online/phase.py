"""The online phase of a run: when it plays, and how the episodes of its rounds reach the batches."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.data.pipeline.replay import RESTORE, ReplayDataset, ReplayError, shard_name
from acrlpd.training.online.records import Round, episode_problems, read_rounds
from acrlpd.training.online.rounds import Player


class OnlinePhase:
    """Keeps the replay as large as the update-to-data ratio asks for, and tells the loader about new episodes.

    Updates count from the beginning of the phase. Rounds are taken in order. When this process plays them, what an
    update sees therefore depends on the run's config alone.
    """

    def __init__(self, rl_config: RLTrainConfig, loader: DataLoader, replay: ReplayDataset, player: Player) -> None:
        self.totals = Counter(env_steps=0, episodes=0, successes=0, lost_episodes=0)
        self.player = player
        self._rounds = 0  # how many rounds were taken
        self._pending: list[Round] = []  # the rounds after them, which wait to be taken
        self._config = rl_config.online
        self._loader = loader
        self._replay = replay

    def begin(self, agent: Agent, step: int) -> None:
        """Tells the player about the newest policy; rounds that are over already wait to be taken."""
        self.player.update_policy(agent, step)
        self._pending += self.player.finished_rounds(self._rounds + len(self._pending))

    def missing_round(self, update: int) -> int | None:
        """The number of the next round that the update needs beside the rounds so far; None if they are enough."""
        env_steps = self.totals["env_steps"] + sum(played.env_steps for played in self._pending)
        return self._rounds + len(self._pending) if env_steps < self._wanted_steps(update) else None

    def add(self, played: Round) -> None:
        """Lets a round wait to be taken; it is the round that `missing_round` asked for."""
        self._pending.append(played)

    def take(self) -> list[dict[str, float]]:
        """Adds the waiting rounds to the replay and, from the next batch on, to the batches; returns their metrics."""
        rounds, self._pending = self._pending, []
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

    def needs_round(self, update: int) -> bool:
        """Whether the update needs more environment steps than the rounds so far have."""
        return self.missing_round(update) is not None

    def updates_ahead(self, step: int, update: int) -> int:
        """How many updates may follow before `begin` must be called again: for a round, or for a newer policy.

        `step` counts the updates of the run so far, and `update` those of the phase.
        """
        spare = self.totals["env_steps"] - self._config.start_steps
        # Rounding may make the first guess too large by one.
        last = max(update, int(spare * self._config.update_to_data_ratio) + 1)
        while last > update and self.needs_round(last):
            last -= 1
        return min(last - update + 1, self.player.updates_with_one_policy(step))

    def _wanted_steps(self, update: int) -> int:
        """The environment steps that must have been made before an update."""
        return self._config.start_steps + math.ceil(update / self._config.update_to_data_ratio)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the rounds that the interrupted run had taken, which are all on disk."""
        root = self._replay.replay.root
        self._pending = read_rounds(root, 0)[: state["rounds"]]
        if len(self._pending) < state["rounds"]:
            raise FileNotFoundError(
                f"{root}: the record of round {len(self._pending)} is missing, and the checkpoint has "
                "learned from this round; restore the replay or start the run again with --overwrite"
            )
        self.take()

    def close(self) -> None:
        self.player.close()
        self._loader.close()  # before the replay, because the loader's threads read from it
        self._replay.close()

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
        for problem in episode_problems(replay.root, played):
            raise ReplayError(problem)
