"""The ground truth of the test datasets: what each frame's pattern says, and the numbers of each step."""

import numpy as np

_COLUMNS, _ROWS = 6, 3


def encode(episode: int, t: int, camera: int, height: int, width: int) -> np.ndarray:
    """A frame whose upper half shows 2 bits of camera, 6 of episode and 10 of step as bright blocks."""
    code = (camera << 16) | (episode << 10) | t
    frame = np.full((height, width, 3), 120, np.uint8)
    frame[height // 2 :, :, 0] = np.arange(width) % 200
    block_h, block_w = height // 2 // _ROWS, width // _COLUMNS
    for bit in range(_COLUMNS * _ROWS):
        row, column = divmod(bit, _COLUMNS)
        block = np.s_[row * block_h : (row + 1) * block_h, column * block_w : (column + 1) * block_w]
        frame[block] = 225 if code >> bit & 1 else 25
    return frame


def decode(frame: np.ndarray) -> tuple[int, int, int]:
    """(episode, t, camera) of a frame, from the middle of each block."""
    block_h, block_w = frame.shape[0] // 2 // _ROWS, frame.shape[1] // _COLUMNS
    upper = frame[: block_h * _ROWS, : block_w * _COLUMNS].astype(np.float64).mean(axis=-1)
    blocks = upper.reshape(_ROWS, block_h, _COLUMNS, block_w)
    middle = blocks[:, block_h // 4 : 3 * block_h // 4, :, block_w // 4 : 3 * block_w // 4]
    bits = middle.mean(axis=(1, 3)).reshape(-1) > 125
    code = int(np.sum(bits.astype(np.int64) << np.arange(len(bits))))
    return (code >> 10) & 63, code & 1023, code >> 16


def decode_all(frames: np.ndarray) -> list[tuple[int, int, int]]:
    return [decode(frame) for frame in frames]


def state(episode: int, length: int, dim: int, ahead: int = 0) -> np.ndarray:
    """States [length, dim]; actions are the states one step ahead."""
    t = np.arange(length)[:, None] + ahead
    return np.sin(np.arange(dim) * 0.3 + t * 0.05 + episode).astype(np.float32)


def length(episode: int, base: int, spread: int) -> int:
    return base + (episode * 37) % spread


def success(episode: int) -> bool:
    return episode % 4 != 3
