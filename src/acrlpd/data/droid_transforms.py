"""DROID: seven joints and a gripper, 8 dims of state and actions, one exterior and one wrist camera."""

import dataclasses

import numpy as np

from acrlpd.data.robot_images import fill_slots
from acrlpd.data.transforms import DataDict, make_bool_mask

ACTION_DIM = 8
# For joint-position actions; joint velocities, DROID's default, are relative as they are.
DELTA_ACTION_MASK = make_bool_mask(7, -1)
CAMERAS = {
    "base_0_rgb": "observation/exterior_image_1_left",
    "left_wrist_0_rgb": "observation/wrist_image_left",
}


@dataclasses.dataclass(frozen=True)
class DroidInputs:
    """DROID's keys (`observation/joint_position`, ...) to the model's names."""

    def __call__(self, data: DataDict) -> DataDict:
        joints = np.asarray(data["observation/joint_position"])
        gripper = np.asarray(data["observation/gripper_position"])
        if gripper.ndim < joints.ndim:  # a scalar per sample
            gripper = gripper[..., None]
        result: DataDict = {"state": np.concatenate([joints, gripper], axis=-1)}
        images = {slot: data.get(camera) for slot, camera in CAMERAS.items()}
        result.update(fill_slots({**images, "right_wrist_0_rgb": None}))
        if "actions" in data:
            result["actions"] = np.asarray(data["actions"])
        if "prompt" in data:
            result["prompt"] = data["prompt"]
        return result


@dataclasses.dataclass(frozen=True)
class DroidOutputs:
    """The model's actions cut to DROID's 8 dims."""

    def __call__(self, data: DataDict) -> DataDict:
        return {"actions": np.asarray(data["actions"])[..., :ACTION_DIM]}
