"""What a policy sees: camera images, proprioceptive state and a tokenised prompt, batched."""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# openpi's camera slots, in the order in which their tokens enter the prefix.
IMAGE_KEYS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
IMAGE_RESOLUTION = (224, 224)

Array = jax.Array | np.ndarray


@flax.struct.dataclass
class Observation:
    """One batch of observations in openpi's vocabulary.

    Images are uint8 in [0, 255] as they travel to the device, or float32 in [-1, 1] as the networks
    eat them; `preprocess_observation` turns the former into the latter on the device.
    """

    images: Mapping[str, Array]  # camera -> [b, h, w, 3]
    image_masks: Mapping[str, Array]  # camera -> bool [b]; False: the camera gave nothing in this sample
    state: Array  # float32 [b, s]
    tokenized_prompt: Array | None = None  # int32 [b, l]
    tokenized_prompt_mask: Array | None = None  # bool [b, l]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Observation":
        """Builds an observation from openpi's nested dict; uint8 images become float32 in [-1, 1]."""
        if ("tokenized_prompt" in data) != ("tokenized_prompt_mask" in data):
            raise ValueError("tokenized_prompt and tokenized_prompt_mask must be given together")
        return cls(
            images={camera: to_float_image(image) for camera, image in data["image"].items()},
            image_masks=dict(data["image_mask"]),
            state=data["state"],
            tokenized_prompt=data.get("tokenized_prompt"),
            tokenized_prompt_mask=data.get("tokenized_prompt_mask"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The nested dict that `from_dict` reads."""
        result: dict[str, Any] = {
            "image": dict(self.images),
            "image_mask": dict(self.image_masks),
            "state": self.state,
        }
        if self.tokenized_prompt is not None:
            result["tokenized_prompt"] = self.tokenized_prompt
            result["tokenized_prompt_mask"] = self.tokenized_prompt_mask
        return result


def to_float_image(image: Array) -> Array:
    """uint8 [0, 255] to float32 [-1, 1]; float images pass through."""
    if image.dtype != np.uint8:
        return image
    xp = jnp if isinstance(image, jax.Array) else np
    return image.astype(xp.float32) / 255.0 * 2.0 - 1.0
