"""How strongly training images are augmented: plain numbers, so that configs can name a level without JAX."""

import dataclasses
import math
from typing import Final, Literal

AugmentationLevel = Literal["light", "standard", "strong"]


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Limits of the random changes of an image. Crops and rotations leave the images of wrist cameras as they are."""

    crop_fraction: float  # side of the random crop, as a share of the image's
    max_rotation: float  # radians
    brightness: float  # largest change towards black or white
    contrast: float  # largest change of the contrast
    hue: float  # largest change, in turns of the colour wheel
    jitter_probability: float  # share of the images whose colours change


AUGMENTATIONS: Final[dict[AugmentationLevel, Augmentation]] = {
    "light": Augmentation(0.98, math.radians(2), brightness=0.15, contrast=0.2, hue=0.05, jitter_probability=0.5),
    "standard": Augmentation(0.95, math.radians(5), brightness=0.3, contrast=0.4, hue=0.1, jitter_probability=0.5),
    "strong": Augmentation(0.9, math.radians(10), brightness=0.45, contrast=0.6, hue=0.15, jitter_probability=0.8),
}
