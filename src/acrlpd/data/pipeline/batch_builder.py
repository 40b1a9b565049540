"""Windows to batches: gathers columns and frames and sends them through the transforms."""

from typing import Any

import numpy as np

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.buffers import BufferPool
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.data.pipeline.windows import make_windows
from acrlpd.models.observation import Observation


class BatchBuilder:
    """Makes host batches of windows of one dataset. Safe to use from several threads at once."""

    def __init__(self, dataset: Dataset, rl_config: RLTrainConfig) -> None:
        self.dataset = dataset
        self.buffers = BufferPool()
        self._horizon_length = rl_config.qchunking.horizon_length
        self._action_horizon = rl_config.model.action_horizon
        self._repack = rl_config.data.repack
        self._transform = dataset.transforms.training_inputs(dataset.norm_stats)
        self._episode_ids = np.array(dataset.source.indices, np.int32)

    def build(self, episodes: np.ndarray, steps: np.ndarray) -> Batch:
        """The batch of windows that start at `steps` of the episodes at positions `episodes`.

        Observations at t and at t + H go through the transforms together, as one batch of twice the size.
        """
        table = self.dataset.table
        windows = make_windows(
            table.offsets,
            self.dataset.rewards,
            episodes,
            steps,
            horizon_length=self._horizon_length,
            action_horizon=self._action_horizon,
        )
        size = len(steps)
        rows = np.concatenate([windows.rows, windows.next_rows])
        action_rows = np.concatenate([windows.action_rows, windows.action_rows])
        data: dict[str, Any] = {name: table.columns[name][rows] for name in self._repack.state}
        data |= {name: table.columns[name][action_rows] for name in self._repack.actions}
        data |= self._read_frames(episodes, rows)
        if self.dataset.prompts is not None:
            data["prompt"] = self.dataset.prompts[table.prompt_index[rows]]
        data = self._transform(data)
        return Batch(
            observations=_observation(data, slice(0, size)),
            next_observations=_observation(data, slice(size, None)),
            actions=data["actions"][:size].astype(np.float32),
            valid=windows.valid,
            rewards=windows.rewards,
            masks=windows.masks,
            terminals=windows.terminals,
            next_terminal=windows.next_terminal,
            sequence_mask=windows.sequence_mask,
            episode_id=self._episode_ids[episodes],
            step_id=steps.astype(np.int32),
        )

    def _read_frames(self, episodes: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Camera -> uint8 [2B, h, w, 3] for the cameras that the policy is given."""
        frames = self.dataset.frames
        if frames is None:
            return {}
        episodes = np.concatenate([episodes, episodes])
        steps = rows - self.dataset.table.offsets[episodes]
        images = {}
        for camera in frames.cameras:
            images[camera] = self.buffers.take((len(rows), frames.height, frames.width, 3))
            frames.read_into(camera, episodes, steps, images[camera])
        return images


def _observation(data: dict[str, Any], part: slice) -> Observation:
    prompt = data.get("tokenized_prompt")
    prompt_mask = data.get("tokenized_prompt_mask")
    return Observation(
        images={key: image[part] for key, image in data.get("image", {}).items()},
        image_masks={key: mask[part] for key, mask in data.get("image_mask", {}).items()},
        state=data["state"][part].astype(np.float32),
        tokenized_prompt=None if prompt is None else prompt[part],
        tokenized_prompt_mask=None if prompt_mask is None else prompt_mask[part],
    )
