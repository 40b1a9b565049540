"""Random episodes in the shapes of a config, for trying things out without a dataset."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from acrlpd.config import RewardConfig, RLTrainConfig
from acrlpd.data.sources.source import ColumnTable, EpisodeSource, Feature

_NUM_EPISODES = 8
_FRAME_SIZE = (48, 64)


class FakeSource(EpisodeSource):
    """A few short episodes of noise; three of four end with reward 1."""

    format = "fake"
    fps = 50.0
    root = Path("fake")

    def __init__(self, cameras: tuple[str, ...], column_dims: dict[str, int], rewards: RewardConfig) -> None:
        self.cameras = cameras
        self.indices = tuple(range(_NUM_EPISODES))
        self._column_dims = column_dims
        self._reward_columns = (rewards.reward_column, rewards.success_column)
        self.features = {name: Feature("float32", (dim,)) for name, dim in column_dims.items()}
        self.features |= {name: Feature("float32", ()) for name in self._reward_columns}
        self.features |= {camera: Feature("image", (*_FRAME_SIZE, 3)) for camera in cameras}

    @property
    def identity(self) -> str:
        return f"fake {sorted(self._column_dims.items())} {self.cameras}"

    def _length(self, index: int) -> int:
        return 60 + 7 * index

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        rng = np.random.default_rng(index)
        length = self._length(index)
        columns = {name: rng.normal(size=(length, dim)) for name, dim in self._column_dims.items()}
        success = np.zeros(length)
        success[-1] = index % 4 != 3
        columns |= dict.fromkeys(self._reward_columns, success)
        kept = {name: x.astype(np.float32) for name, x in columns.items() if names is None or name in names}
        return ColumnTable(kept, np.array([0, length]), ("do nothing",), np.zeros(length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        seeds = [[index, self.cameras.index(camera), t] for t in ts.tolist()]
        frames = [np.random.default_rng(seed).integers(0, 256, (*_FRAME_SIZE, 3), np.uint8) for seed in seeds]
        return np.stack(frames) if frames else np.zeros((0, *_FRAME_SIZE, 3), np.uint8)

    def _check_camera(self, index: int, camera: str) -> None:
        pass


def create_fake_source(rl_config: RLTrainConfig) -> FakeSource:
    """A source with the columns and cameras that the config's repack transform asks for."""
    config, model, action_dim = rl_config.data, rl_config.model, rl_config.qchunking.action_dim
    dims = [dim or (action_dim if model.pads_actions else model.state_dim) for dim in config.robot.state_dims.values()]
    states = _split(config.repack.state, dims[0]) if len(dims) == 1 else zip(config.repack.state, dims, strict=True)
    columns = dict(states) | dict(_split(config.repack.actions, action_dim))
    return FakeSource(tuple(config.repack.cameras.values()), columns, config.rewards)


def _split(names: tuple[str, ...], dim: int) -> list[tuple[str, int]]:
    """Every column gets one dim, and the first column also gets the dims that are left."""
    return [(name, 1 if i else dim - len(names) + 1) for i, name in enumerate(names)]
