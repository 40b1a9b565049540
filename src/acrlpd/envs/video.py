"""Films of episodes: H.264 in MP4, which plays everywhere."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def write_video(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Frames uint8 [h, w, 3], cut to even sizes as the format needs them."""
    height, width = (size // 2 * 2 for size in frames[0].shape[:2])
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
