"""LIBERO: end-effector control, 8 dims of state, 7 of actions, one scene and one wrist camera."""

import dataclasses

import numpy as np

from acrlpd.data.robot_images import fill_slots
from acrlpd.data.transforms import DataDict, make_bool_mask

ACTION_DIM = 7
# What openpi's pi0_libero subtracts on top of LIBERO's own deltas; its pi05_libero does not.
DELTA_ACTION_MASK = make_bool_mask(6, -1)
CAMERAS = {"base_0_rgb": "observation/image", "left_wrist_0_rgb": "observation/wrist_image"}


@dataclasses.dataclass(frozen=True)
class LiberoInputs:
    """LIBERO's keys (`observation/image`, ...) to the model's names."""

    def __call__(self, data: DataDict) -> DataDict:
        result: DataDict = {"state": np.asarray(data["observation/state"])}
        images = {slot: data.get(camera) for slot, camera in CAMERAS.items()}
        result.update(fill_slots({**images, "right_wrist_0_rgb": None}))
        if "actions" in data:
            result["actions"] = np.asarray(data["actions"])
        if "prompt" in data:
            result["prompt"] = data["prompt"]
        return result


@dataclasses.dataclass(frozen=True)
class LiberoOutputs:
    """The model's actions cut to LIBERO's 7 dims."""

    def __call__(self, data: DataDict) -> DataDict:
        return {"actions": np.asarray(data["actions"])[..., :ACTION_DIM]}
