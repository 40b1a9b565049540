"""The replay as a dataset: it grows while the run reads it, and is seen through the transforms of the prior data."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.frames.store import open_frame_store
from acrlpd.data.pipeline.dataset import Dataset, fill_prompts, read_columns
from acrlpd.data.pipeline.replay import Replay
from acrlpd.data.pipeline.rewards import StepRewards, compute_rewards, environment_rewards
from acrlpd.data.sources.source import DatasetError, concatenate_tables


class ReplayDataset:
    """Admitted episodes of a replay as a `Dataset`."""

    def __init__(self, replay: Replay, rl_config: RLTrainConfig, prior: Dataset) -> None:
        """Rewards are of the same kind as those of the `prior` data."""
        self.replay = replay
        self._dataset: Dataset | None = None
        self._config = rl_config.data
        self._rewards = environment_rewards(rl_config.data.rewards, prior.rewards.origin)
        self._prior = prior
        self._frames = None
        if prior.frames is not None:
            frames = prior.frames
            self._frames = open_frame_store(replay, height=frames.height, width=frames.width, cameras=frames.cameras)

    def admit(self, numbers: Sequence[int]) -> Dataset:
        """Adds episodes that are on disk, in this order; the dataset with all that were added so far."""
        seen = len(self.replay)
        self.replay.admit(numbers)
        new = self.replay.without(dict.fromkeys(self.replay.indices[:seen], "known"))
        table = read_columns(new, dataclasses.replace(self._config, rewards=self._rewards), rewards=True)
        rewards = compute_rewards(table, new.indices, self._rewards, None)
        if self._dataset is not None:
            table = concatenate_tables([self._dataset.table, table])
            rewards = _concatenate(self._dataset.rewards, rewards)
        self._dataset = dataclasses.replace(
            self._prior,
            source=self.replay,
            frames=self._frames,
            table=table,
            rewards=rewards,
            prompts=None if self._prior.prompts is None else fill_prompts(self.replay, table, self._config),
        )
        return self._dataset

    def close(self) -> None:
        if self._frames is not None:
            self._frames.close()


def _concatenate(first: StepRewards, second: StepRewards) -> StepRewards:
    if first.origin != second.origin:
        raise DatasetError(f"rewards of the replay changed their origin: {first.origin}, then {second.origin}")
    names = ("rewards", "terminals", "after_terminal", "success")
    joined = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names}
    return StepRewards(**joined, origin=first.origin)
