"""What a policy sees, batched: camera images, proprioceptive state and a tokenised prompt.

Images become what SigLIP reads: resized with padding and, in training, augmented. openpi augments with augmax 0.4.1.
The same random streams and the same resampling are written here over whole images instead of pixel by pixel, so that
a key gives openpi's images without that dependency.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.models.augmentation import AUGMENTATIONS, Augmentation, AugmentationLevel

if TYPE_CHECKING:
    from acrlpd.models.families.base import PolicyConfig

Array = jax.Array | np.ndarray

# Labels of prompts; the first two are places along the second axis of `Observation.labelled_prompt`.
NEGATIVE, POSITIVE, NO_LABEL = 0, 1, -1


@flax.struct.dataclass
class Observation:
    """One batch of observations in openpi's vocabulary.

    Images travel to the device as uint8 in [0, 255]. The networks read float32 in [-1, 1];
    `preprocess_observation` converts them on the device.
    """

    images: Mapping[str, Array]  # camera -> [b, h, w, 3]
    image_masks: Mapping[str, Array]  # camera -> bool [b]; False: the camera gave nothing in this sample
    state: Array  # float32 [b, s]
    tokenized_prompt: Array | None = None  # int32 [b, l]
    tokenized_prompt_mask: Array | None = None  # bool [b, l]
    # The same prompt with a label that says how good the actions to come are, NEGATIVE and POSITIVE along the second
    # axis; None for policies whose prompts have no such label.
    labelled_prompt: Array | None = None  # int32 [b, 2, l]
    labelled_prompt_mask: Array | None = None  # bool [b, 2, l]
    # The logged chunk of a training sample as tokens, then zeros; None for policies that read the chunk itself.
    action_tokens: Array | None = None  # int32 [b, l]

    def with_label(self, label: Array) -> "Observation":
        """The observation whose prompt has a label, int [b]: NEGATIVE, POSITIVE, or NO_LABEL for the plain prompt."""
        if self.labelled_prompt is None or self.tokenized_prompt is None:
            raise ValueError("the observation has no labelled prompt; its policy was not trained with labels")
        plain = (jnp.asarray(label) == NO_LABEL)[:, None]
        row = jnp.maximum(jnp.asarray(label), 0)[:, None, None]

        def choose(unlabelled: Array | None, labelled: Array | None) -> jax.Array:
            chosen = jnp.take_along_axis(jnp.asarray(labelled), row, axis=1)[:, 0]
            return jnp.where(plain, jnp.asarray(unlabelled), chosen)

        return dataclasses.replace(
            self,
            tokenized_prompt=choose(self.tokenized_prompt, self.labelled_prompt),
            tokenized_prompt_mask=choose(self.tokenized_prompt_mask, self.labelled_prompt_mask),
        )


def to_float_image(image: Array) -> Array:
    """uint8 [0, 255] to float32 [-1, 1]; float images pass through."""
    if image.dtype != np.uint8:
        return image
    xp = jnp if isinstance(image, jax.Array) else np
    return image.astype(xp.float32) / 255.0 * 2.0 - 1.0


def preprocess_observation(
    rng: jax.Array | None,
    observation: Observation,
    config: "PolicyConfig",
    *,
    train: bool,
    level: AugmentationLevel = "standard",
) -> Observation:
    """Float images of the right size for exactly the policy's cameras, augmented when `train`; masks filled in.

    The level "standard" is openpi's own augmentation.
    """
    image_keys = config.image_keys
    missing = [key for key in image_keys if key not in observation.images]
    if missing:
        raise ValueError(
            f"observation lacks camera {', '.join(missing)}: the model's image_keys are {image_keys}, found "
            f"{tuple(observation.images)}. Provide the camera, or leave it out of image_keys"
        )
    batch_size = observation.state.shape[0]
    images, masks = {}, {}
    for key in image_keys:
        image = jnp.asarray(to_float_image(observation.images[key]))
        if image.shape[1:3] != config.image_resolution:
            image = resize_with_pad(image, *config.image_resolution)
        if train:
            if rng is None:
                raise ValueError("train=True augments images and needs a random key")
            keys = jax.random.split(rng, batch_size)  # the same for every camera, as in openpi
            augment = functools.partial(augment_wrist if "wrist" in key else augment_base, limits=AUGMENTATIONS[level])
            image = jax.vmap(augment)(keys, image / 2 + 0.5) * 2 - 1
        images[key] = image
        mask = observation.image_masks.get(key)
        masks[key] = jnp.ones(batch_size, jnp.bool_) if mask is None else jnp.asarray(mask)
    return dataclasses.replace(observation, images=images, image_masks=masks)


def resize_with_pad(images: jax.Array, height: int, width: int) -> jax.Array:
    """Resizes [..., h, w, 3] without distortion and centres it on black."""
    *lead, h, w, c = images.shape
    ratio = max(w / width, h / height)
    new_h, new_w = int(h / ratio), int(w / ratio)
    resized = jax.image.resize(images.astype(jnp.float32), (*lead, new_h, new_w, c), method="linear")
    if images.dtype == jnp.uint8:
        resized, black = jnp.clip(jnp.round(resized), 0, 255).astype(jnp.uint8), 0
    else:
        resized, black = jnp.clip(resized, -1.0, 1.0).astype(images.dtype), -1
    top, left = (height - new_h) // 2, (width - new_w) // 2
    padding = [(0, 0)] * len(lead) + [(top, height - new_h - top), (left, width - new_w - left), (0, 0)]
    return jnp.pad(resized, padding, constant_values=black)


def augment_base(rng: jax.Array, image: jax.Array, *, limits: Augmentation) -> jax.Array:
    """Random crop, small rotation and colour jitter of a [h, w, 3] image in [0, 1]."""
    geometry_rng, colour_rng = jax.random.split(rng, 2)
    image = _crop_and_rotate(geometry_rng, image, limits)
    return _jitter_colours(jax.random.split(colour_rng, 1)[0], image, limits)


def augment_wrist(rng: jax.Array, image: jax.Array, *, limits: Augmentation) -> jax.Array:
    """Colour jitter alone: a wrist camera's geometry says where the gripper is."""
    colour_rng = jax.random.split(rng, 1)[0]
    return _jitter_colours(jax.random.split(colour_rng, 1)[0], image, limits)


def _crop_and_rotate(rng: jax.Array, image: jax.Array, limits: Augmentation) -> jax.Array:
    """One bilinear resample of: random crop, scale back, rotate about the centre; outside is black."""
    crop_rng, _, rotate_rng = jax.random.split(rng, 3)
    h, w, _ = image.shape
    crop_h, crop_w = int(h * limits.crop_fraction), int(w * limits.crop_fraction)
    reach = jnp.array([(h - crop_h) / 2, (w - crop_w) / 2])
    offset = jax.random.uniform(crop_rng, (2,), minval=-reach, maxval=reach)
    theta = jax.random.uniform(rotate_rng, minval=-limits.max_rotation, maxval=limits.max_rotation)
    centre = jnp.array([h / 2 - 0.5, w / 2 - 0.5])
    y, x = jnp.meshgrid(jnp.arange(h) - centre[0], jnp.arange(w) - centre[1], indexing="ij")
    source_y = (jnp.cos(theta) * y + jnp.sin(theta) * x) * (crop_h / h) + offset[0] + centre[0]
    source_x = (jnp.cos(theta) * x - jnp.sin(theta) * y) * (crop_w / w) + offset[1] + centre[1]
    return _sample_bilinear(image, source_y, source_x)


def _sample_bilinear(image: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """Values of [h, w, c] at real coordinates [h', w']; corners outside the image count as zero."""
    h, w, _ = image.shape
    top, left = jnp.floor(y), jnp.floor(x)
    result = jnp.zeros((*y.shape, image.shape[-1]), image.dtype)
    for corner_y, weight_y in ((top, top + 1 - y), (top + 1, y - top)):
        for corner_x, weight_x in ((left, left + 1 - x), (left + 1, x - left)):
            inside = (corner_y >= 0) & (corner_y < h) & (corner_x >= 0) & (corner_x < w)
            rows = jnp.clip(corner_y, 0, h - 1).astype(jnp.int32)
            columns = jnp.clip(corner_x, 0, w - 1).astype(jnp.int32)
            result += image[rows, columns] * jnp.where(inside, weight_y * weight_x, 0.0)[..., None]
    return result


def _jitter_colours(rng: jax.Array, image: jax.Array, limits: Augmentation) -> jax.Array:
    """Brightness, contrast and hue of an RGB image in [0, 1], on a share of the images; never clipped.

    augmax draws a change of saturation, too, and drops it; the fifth key of the split belongs to it.
    """
    brightness_rng, contrast_rng, hue_rng, _, _ = jax.random.split(rng, 5)
    brightness = jax.random.uniform(brightness_rng, minval=-limits.brightness, maxval=limits.brightness)
    contrast = jax.random.uniform(contrast_rng, minval=-limits.contrast, maxval=limits.contrast)
    hue, saturation, value = _rgb_to_hsv(image)
    # Towards black for a negative change of brightness, towards white for a positive one.
    value = _adjust_contrast(value * (1.0 - jnp.abs(brightness)) + jnp.maximum(brightness, 0.0), contrast)
    hue = hue + jax.random.uniform(hue_rng, minval=-limits.hue, maxval=limits.hue)
    jittered = _hsv_to_rgb(hue, saturation, value)
    return jnp.where(jax.random.bernoulli(rng, limits.jitter_probability), jittered, image)


def _adjust_contrast(value: jax.Array, amount: jax.Array) -> jax.Array:
    """A piecewise linear curve through (0, 0), (1/2, 1/2) and (1, 1) with the given slope in the middle."""
    slope = jnp.tan((amount + 1.0) * (jnp.pi / 4))
    low = (slope - jnp.square(slope)) / (2 * (1 - jnp.square(slope)))
    middle = slope * (value - 0.5) + 0.5
    return jnp.where(value < low, value / slope, jnp.where(value > 1 - low, value / slope + 1 - 1 / slope, middle))


def _rgb_to_hsv(image: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hue in turns, saturation and value, each [h, w]."""
    value = jnp.max(image, axis=-1)
    chroma = value - jnp.min(image, axis=-1)
    largest = jnp.argmax(image, axis=-1)
    following = jnp.take_along_axis(image, ((largest + 1) % 3)[..., None], axis=-1)[..., 0]
    preceding = jnp.take_along_axis(image, ((largest + 2) % 3)[..., None], axis=-1)[..., 0]
    safe_chroma, safe_value = jnp.where(chroma == 0, 1.0, chroma), jnp.where(value == 0, 1.0, value)
    hue = jnp.where(chroma == 0, 0.0, (2 * largest + (following - preceding) / safe_chroma) / 6)
    return hue, jnp.where(value == 0, 0.0, chroma / safe_value), value


def _hsv_to_rgb(hue: jax.Array, saturation: jax.Array, value: jax.Array) -> jax.Array:
    k = jnp.mod(jnp.array([5.0, 3.0, 1.0]) + hue[..., None] * 6, 6)
    ramp = jnp.maximum(0.0, jnp.minimum(jnp.minimum(k, 4 - k), 1.0))
    return value[..., None] - (value * saturation)[..., None] * ramp
