"""What the transforms of all robots have in common."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from acrlpd.data.pipeline.transforms import DataDict
from acrlpd.robots.images import fill_slots


def to_model_names(data: DataDict, state: np.ndarray, images: Mapping[str, np.ndarray | None]) -> DataDict:
    """The model's {"state", "image", "image_mask", "actions", "prompt"}; `images` is slot -> image or None.

    What a robot at work does not have (actions) or a caller leaves out (images, prompt) stays away.
    """
    result: DataDict = {"state": state, **fill_slots(images)}
    if "actions" in data:
        result["actions"] = np.asarray(data["actions"])
    if "prompt" in data:
        result["prompt"] = data["prompt"]
    return result


@dataclasses.dataclass(frozen=True)
class RobotOutputs:
    """The model's actions cut to the robot's own dims."""

    action_dim: int

    def __call__(self, data: DataDict) -> DataDict:
        return {"actions": np.asarray(data["actions"])[..., : self.action_dim]}
