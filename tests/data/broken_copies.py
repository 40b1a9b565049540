"""Ways to break a copy of a dataset, and what must be said of it."""

from pathlib import Path

import av
import frame_codes
import pytest

from acrlpd.data.sources.source import EpisodeError, open_source
from acrlpd.data.tools.inspect import inspect_source


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # it is a hard link to the original
    path.write_bytes(data)


def replace_video(path: Path, *, rate: int, frames: int, height: int, width: int) -> None:
    path.unlink()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=rate)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for t in range(frames):
            frame = frame_codes.encode(1, t, 0, height, width)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def assert_bad(root: Path, episode: int, message: str) -> None:
    """The episode is refused with the message when it is read or checked, and can be skipped."""
    source = open_source(root)
    with pytest.raises(EpisodeError, match=message):
        source.check(episode)
    skipping = open_source(root, on_bad_episode="skip")
    assert [e.index for e in skipping.skipped] == [episode]
    assert inspect_source(skipping).episodes == len(source) - 1
