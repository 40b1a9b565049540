"""DROID: seven joints and a gripper, 8 dims of state and actions, one exterior and one wrist camera."""

import dataclasses

import numpy as np

from acrlpd.data.pipeline.transforms import DataDict, make_bool_mask
from acrlpd.robots.naming import to_model_names

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
        images = {slot: data.get(camera) for slot, camera in CAMERAS.items()}
        state = np.concatenate([joints, gripper], axis=-1)
        return to_model_names(data, state, {**images, "right_wrist_0_rgb": None})
