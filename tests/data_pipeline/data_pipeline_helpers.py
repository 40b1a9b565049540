import numpy as np


def decode_identity(image: np.ndarray) -> tuple[int, int, int]:
    """(episode, step, camera) from the 6 x 3 grid of black and white blocks in the image's upper half."""
    h, w = image.shape[0] // 2 // 3, image.shape[1] // 6
    code = 0
    for bit in range(18):
        row, column = divmod(bit, 6)
        block = image[row * h + h // 4 : row * h + 3 * h // 4, column * w + w // 4 : column * w + 3 * w // 4]
        code |= (block.mean() > 125) << bit
    return (code >> 10) & 63, code & 1023, code >> 16
