"""LIBERO: end-effector control, 8 dims of state, 7 of actions, one scene and one wrist camera."""

import dataclasses

import numpy as np

from acrlpd.data.pipeline.transforms import DataDict, make_bool_mask
from acrlpd.robots.naming import to_model_names

ACTION_DIM = 7
# What openpi's pi0_libero subtracts on top of LIBERO's own deltas; its pi05_libero does not.
DELTA_ACTION_MASK = make_bool_mask(6, -1)
CAMERAS = {"base_0_rgb": "observation/image", "left_wrist_0_rgb": "observation/wrist_image"}


@dataclasses.dataclass(frozen=True)
class LiberoInputs:
    """LIBERO's keys (`observation/image`, ...) to the model's names."""

    def __call__(self, data: DataDict) -> DataDict:
        images = {slot: data.get(camera) for slot, camera in CAMERAS.items()}
        state = np.asarray(data["observation/state"])
        return to_model_names(data, state, {**images, "right_wrist_0_rgb": None})
