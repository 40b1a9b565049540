"""How a robot's cameras fill the model's three image slots."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def parse_image(image: np.ndarray) -> np.ndarray:
    """To uint8 [..., h, w, 3], from float in [0, 1] and from channels-first, as robots send them."""
    image = np.asarray(image)
    if np.issubdtype(image.dtype, np.floating):
        image = (255 * image).astype(np.uint8)
    if image.shape[-3] == 3:
        image = np.moveaxis(image, -3, -1)
    return image


def fill_slots(images: Mapping[str, np.ndarray | None]) -> dict[str, Any]:
    """{"image", "image_mask"} for slot -> image, where a missing camera is black and masked out.

    Without any image the result is empty: norm statistics run the chain on low-dimensional data alone.
    """
    parsed = {slot: parse_image(image) for slot, image in images.items() if image is not None}
    if not parsed:
        return {}
    reference = next(iter(parsed.values()))
    batch_shape = reference.shape[:-3]
    return {
        "image": {slot: parsed[slot] if slot in parsed else np.zeros_like(reference) for slot in images},
        "image_mask": {slot: np.full(batch_shape, slot in parsed) for slot in images},
    }
