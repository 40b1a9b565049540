"""Any other robot: state and actions as they are, cameras named by the model's slots."""

import dataclasses

import numpy as np

from acrlpd.data.robot_images import fill_slots
from acrlpd.data.transforms import DataDict

CAMERAS = {slot: slot for slot in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")}


@dataclasses.dataclass(frozen=True)
class GenericInputs:
    """{"state", "images" {base_0_rgb, ...}, "actions", "prompt"} to the model's names."""

    def __call__(self, data: DataDict) -> DataDict:
        images = data.get("images", {})
        unknown = set(images) - set(CAMERAS)
        if unknown:
            raise ValueError(f"images are named by the model's slots {list(CAMERAS)}; found {sorted(unknown)}")
        result: DataDict = {"state": np.asarray(data["state"])}
        result.update(fill_slots({slot: images.get(slot) for slot in CAMERAS}))
        if "actions" in data:
            result["actions"] = np.asarray(data["actions"])
        if "prompt" in data:
            result["prompt"] = data["prompt"]
        return result


@dataclasses.dataclass(frozen=True)
class GenericOutputs:
    """The model's actions cut to the robot's own dims."""

    action_dim: int

    def __call__(self, data: DataDict) -> DataDict:
        return {"actions": np.asarray(data["actions"])[..., : self.action_dim]}
