"""A small convolutional network that says what cameras see, and where."""

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.observation import Observation, to_float_image

# Height and width of the images that the network reads; images of other sizes are resized.
_RESOLUTION = 84
_CHANNELS = (32, 64, 64, 64)
# Height and width after four convolutions that each halve them.
_PLACES = 6
_GROUPS = 8
_FLOAT32 = 4


class ImageEncoder(nnx.Module):
    """Four convolutions with GroupNorm, and one linear layer over all places of all cameras.

    The cameras share the convolutions. A camera that gave nothing in a sample counts as zeros.
    """

    width = 256  # of the result

    def __init__(self, image_keys: tuple[str, ...], rngs: nnx.Rngs):
        self.image_keys = image_keys
        dims = zip((3, *_CHANNELS[:-1]), _CHANNELS, strict=True)
        self.convolutions = nnx.List(nnx.Conv(*dim, (3, 3), strides=2, rngs=rngs) for dim in dims)
        self.norms = nnx.List(nnx.GroupNorm(channels, num_groups=_GROUPS, rngs=rngs) for channels in _CHANNELS)
        self.out = nnx.Linear(len(image_keys) * _PLACES**2 * _CHANNELS[-1], self.width, rngs=rngs)

    def __call__(self, observation: Observation) -> jax.Array:  # float32 [b, width]
        """`observation` is preprocessed: all images have one size."""
        # Samples come first, so that samples that lie on several devices stay where they are.
        x = jnp.stack([to_float_image(jnp.asarray(observation.images[key])) for key in self.image_keys], axis=1)
        b, cameras, *shape = x.shape
        x = x.reshape(b * cameras, *shape)
        x = jax.image.resize(x, (b * cameras, _RESOLUTION, _RESOLUTION, 3), method="linear")
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.relu(norm(convolution(x)))
        masks = jnp.stack([jnp.asarray(observation.image_masks[key]) for key in self.image_keys], axis=1)
        seen = jnp.where(masks[..., None], x.reshape(b, cameras, -1), 0.0)
        return self.out(seen.reshape(b, -1))

    @property
    def working_bytes(self) -> int:
        """Bytes per sample that a backward pass needs: inputs, and what convolutions, norms and relus return."""
        numbers, size = 3 * _RESOLUTION**2, _RESOLUTION
        for channels in _CHANNELS:
            size = -(-size // 2)
            numbers += 3 * channels * size**2
        return len(self.image_keys) * numbers * _FLOAT32
