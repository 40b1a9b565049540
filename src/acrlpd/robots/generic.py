"""Any other robot: state and actions as they are, cameras named by the model's slots."""

import dataclasses

import numpy as np

from acrlpd.data.pipeline.transforms import DataDict
from acrlpd.robots.naming import to_model_names

CAMERAS = {slot: slot for slot in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")}


@dataclasses.dataclass(frozen=True)
class GenericInputs:
    """{"state", "images" {base_0_rgb, ...}, "actions", "prompt"} to the model's names."""

    def __call__(self, data: DataDict) -> DataDict:
        images = data.get("images", {})
        unknown = set(images) - set(CAMERAS)
        if unknown:
            raise ValueError(f"images are named by the model's slots {list(CAMERAS)}; found {sorted(unknown)}")
        return to_model_names(data, np.asarray(data["state"]), {slot: images.get(slot) for slot in CAMERAS})
