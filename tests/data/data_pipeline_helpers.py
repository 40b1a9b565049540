"""Frames that say what they are, and batches of small configs."""

import dataclasses

import jax
import numpy as np

from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.models.families.pi0 import Pi0Config

H, T = 4, 6
SIZE = 128
MODEL = Pi0Config(
    paligemma_variant="dummy",
    action_expert_variant="dummy",
    siglip_variant="mu/14",
    vocab_size=512,
    action_horizon=T,
    image_resolution=(SIZE, SIZE),
    image_keys=("base_0_rgb", "left_wrist_0_rgb"),
)


def decode_identity(image: np.ndarray) -> tuple[int, int, int]:
    """(episode, step, camera) from the 6 x 3 grid of black and white blocks in the image's upper half."""
    h, w = image.shape[0] // 2 // 3, image.shape[1] // 6
    code = 0
    for bit in range(18):
        row, column = divmod(bit, 6)
        block = image[row * h + h // 4 : row * h + 3 * h // 4, column * w + w // 4 : column * w + 3 * w // 4]
        code |= (block.mean() > 125) << bit
    return (code >> 10) & 63, code & 1023, code >> 16


def with_data(config, **changes):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def batches(config, count, *, batch_size=None, **arguments):
    with DataLoader(open_dataset(config), config, batch_size=batch_size or config.batch_size, **arguments) as loader:
        return [loader.sample_batch() for _ in range(count)]


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
