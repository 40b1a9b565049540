"""The one image resize of the data layer: bilinear, aspect ratio kept, black borders."""

import numpy as np
from PIL import Image


def resize_with_pad(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Fits uint8 images [..., h, w, 3] into height x width without distorting them.

    Pixel-equal to what openpi's client sends to its policy server, so a policy trained on our frames
    sees the same pixels when it is served. An image that has the size already is returned as it is.
    """
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] != 3:
        raise ValueError(f"images must be uint8 [..., h, w, 3], found {images.dtype} {list(images.shape)}")
    if images.shape[-3:-1] == (height, width):
        return images
    *batch_shape, h, w, _ = images.shape
    ratio = max(w / width, h / height)
    new_h, new_w = int(h / ratio), int(w / ratio)
    top, left = (height - new_h) // 2, (width - new_w) // 2
    resized = np.zeros((*batch_shape, height, width, 3), np.uint8)
    for k in np.ndindex(*batch_shape):
        # One axis after the other: Pillow versions order (and so round) a resize of both axes differently.
        narrow = Image.fromarray(images[k]).resize((new_w, h), Image.Resampling.BILINEAR)
        fitted = narrow.resize((new_w, new_h), Image.Resampling.BILINEAR)
        resized[k][top : top + new_h, left : left + new_w] = np.asarray(fitted)
    return resized
