"""Resize and augmentation give openpi's pixels."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_goldens import load_golden, tiny_config

from acrlpd.models.augmentation import AugmentationLevel
from acrlpd.models.observation import Observation, preprocess_observation, resize_with_pad
from acrlpd.models.paligemma_config import IMAGE_KEYS


def test_resize_with_pad_matches_openpi():
    golden = load_golden("resize_with_pad")
    cases = sorted({key.split("/")[0] for key in golden if key.endswith("target_hw")})
    assert len(cases) == 5
    for case in cases:
        image = golden[f"{case}/in_uint8"]
        height, width = (int(x) for x in golden[f"{case}/target_hw"])
        resized = np.asarray(resize_with_pad(jnp.asarray(image), height, width))
        # XLA versions may round a half to either side.
        assert np.abs(resized.astype(int) - golden[f"{case}/jax_uint8"].astype(int)).max() <= 1, case
        assert (resized != golden[f"{case}/jax_uint8"]).mean() < 1e-3, case
        if f"{case}/jax_float32" in golden:
            as_float = image.astype(np.float32) / 255 * 2 - 1
            resized = resize_with_pad(jnp.asarray(as_float), height, width)
            np.testing.assert_allclose(resized, golden[f"{case}/jax_float32"], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 3])
def test_augmentation_matches_openpi(seed):
    golden = load_golden("augment")
    images = {key: golden[f"in_uint8/{key}"] for key in IMAGE_KEYS}
    observation = Observation(images=images, image_masks={}, state=np.zeros((2, 4), np.float32))
    out = preprocess_observation(jax.random.key(seed), observation, tiny_config(image_resolution=(56, 56)), train=True)
    for key in IMAGE_KEYS:
        np.testing.assert_allclose(out.images[key], golden[f"out_seed{seed}/{key}"], atol=2e-5, rtol=1e-5)
        np.testing.assert_array_equal(out.image_masks[key], golden[f"default_masks/{key}"])


def test_a_higher_level_changes_images_more():
    y, x = np.mgrid[0:1:28j, 0:1:28j]
    image = np.stack([y, x, (y + x) / 2], axis=-1).astype(np.float32) * 2 - 1
    keys = IMAGE_KEYS[:2]  # a fixed camera and one at the wrist
    assert "wrist" in keys[1]
    images = {key: np.repeat(image[None], 16, axis=0) for key in keys}
    observation = Observation(images=images, image_masks={}, state=np.zeros((16, 4), np.float32))
    config = tiny_config(image_resolution=(28, 28), image_keys=keys)

    def changes(observation):
        key, levels = jax.random.key(0), get_args(AugmentationLevel)
        seen = [preprocess_observation(key, observation, config, train=True, level=level).images for level in levels]
        return [[jnp.abs(images[name] - image).mean() for images in seen] for name in keys]

    quickly = jax.jit(changes, compiler_options={"xla_backend_optimization_level": 0})
    for light, standard, strong in quickly(observation):
        assert 0 < light < standard < strong


def test_missing_camera_is_named():
    observation = Observation(images={}, image_masks={}, state=np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="lacks camera base_0_rgb"):
        preprocess_observation(None, observation, tiny_config(), train=False)
