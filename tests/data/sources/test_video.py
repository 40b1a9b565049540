"""Random access to videos of every make: the right frame or an error, never a wrong frame."""

import contextlib
import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import frame_codes
import numpy as np
import pytest

from acrlpd.data.sources.source import BadDataError
from acrlpd.data.sources.video import VideoPool, VideoReader, read_video_frames

FRAMES, FPS, SIZE = 90, 25, (96, 128)
ENCODINGS = {
    "av1, keyframe every 2": ("libsvtav1", {"g": "2", "preset": "10"}),
    "av1, keyframe every 30": ("libsvtav1", {"g": "30", "preset": "10"}),
    "h264, no B-frames": ("h264", {"g": "12", "bf": "0"}),
    "h264, B-frames": ("h264", {"g": "48", "bf": "3"}),
    "h264, one keyframe": ("h264", {"g": "1000", "bf": "2"}),
    "h264, open GOP": ("h264", {"g": "20", "bf": "3", "x264-params": "open-gop=1"}),
    "mpeg4": ("mpeg4", {"g": "12", "qscale": "3", "flags": "qscale"}),
}


def write_video(path: Path, codec: str, options: dict[str, str], steps: list[int] | None = None) -> Path:
    os.environ["SVT_LOG"] = "1"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        for t in range(FRAMES) if steps is None else steps:
            frame = av.VideoFrame.from_ndarray(frame_codes.encode(1, t, 2, *SIZE), format="rgb24")
            frame.pts = t
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="module", params=sorted(ENCODINGS))
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "video.mp4", *ENCODINGS[request.param])


def test_any_frame_in_any_order(video: Path) -> None:
    pool = VideoPool()
    rng = np.random.default_rng(0)
    for _ in range(12):
        ts = rng.integers(0, FRAMES, rng.integers(1, 9))
        frames = read_video_frames(pool, video, ts, fps=FPS)
        assert frame_codes.decode_all(frames) == [(1, t, 2) for t in ts.tolist()]


def test_all_frames_backwards(video: Path) -> None:
    reader = VideoReader(video)
    found = [frame_codes.decode(reader.frame(t / FPS, FPS)) for t in reversed(range(FRAMES))]
    assert found == [(1, t, 2) for t in reversed(range(FRAMES))]


def test_a_clip_inside_a_file_starts_at_its_time(video: Path) -> None:
    frames = read_video_frames(VideoPool(), video, np.array([0, 7]), start=31 / FPS, fps=FPS)
    assert [code[1] for code in frame_codes.decode_all(frames)] == [31, 38]


@pytest.mark.parametrize("drift", [-0.4, 0.4])
def test_a_start_that_drifted_by_less_than_half_a_frame_is_forgiven(video: Path, drift: float) -> None:
    frames = read_video_frames(VideoPool(), video, np.array([5]), start=(20 + drift) / FPS, fps=FPS)
    assert frame_codes.decode(frames[0])[1] == 25


def test_a_frame_that_was_never_written_is_an_error(tmp_path: Path) -> None:
    steps = [t for t in range(FRAMES) if t not in (40, 41)]
    path = write_video(tmp_path / "gap.mp4", "h264", {"g": "12"}, steps)
    pool = VideoPool()
    assert frame_codes.decode(read_video_frames(pool, path, np.array([42]), fps=FPS)[0])[1] == 42
    with pytest.raises(BadDataError, match=r"no frame at 1.6000 s: the nearest is at 1.6800 s") as caught:
        read_video_frames(pool, path, np.array([39, 40]), fps=FPS)
    assert caught.value.frame == 40


@pytest.mark.parametrize(("first", "last_shown"), [(0, None), (15, None), (0, 0.1), (0, 30)])
@pytest.mark.parametrize("options", [{"bf": "0"}, {"bf": "3"}])
def test_frames_by_number_wherever_the_file_begins_and_however_long_it_shows_the_last(
    tmp_path: Path, options: dict[str, str], first: int, last_shown: float | None
) -> None:
    path, packets = tmp_path / "video.mp4", []
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        for t in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(frame_codes.encode(1, t, 2, *SIZE), format="rgb24")
            frame.pts, frame.time_base = (first + t) * 10, Fraction(1, 10 * FPS)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        if last_shown is not None:
            packets[-1].duration = round(last_shown / FPS / packets[-1].time_base)
        container.mux(packets)
    frames = read_video_frames(VideoPool(), path, np.arange(FRAMES))
    assert [code[1] for code in frame_codes.decode_all(frames)] == list(range(FRAMES))
    reader = VideoReader(path)
    start, fps = reader.numbering()
    assert fps == pytest.approx(FPS)
    reader.check_range(start, FRAMES, fps)
    with pytest.raises(BadDataError, match="the last frame is at"):
        reader.check_range(start, FRAMES + 1, fps)


def test_frames_that_cannot_be_counted_are_an_error(tmp_path: Path) -> None:
    steps = [t for t in range(FRAMES) if t not in (40, 41)]
    path = write_video(tmp_path / "gap.mp4", "h264", {"g": "12"}, steps)
    with pytest.raises(BadDataError, match=r"frames are not evenly spaced"):
        read_video_frames(VideoPool(), path, np.array([25]))


def test_past_the_end_is_an_error(video: Path) -> None:
    with pytest.raises(BadDataError, match=r"the video ends before") as caught:
        read_video_frames(VideoPool(), video, np.array([FRAMES - 1, FRAMES]), fps=FPS)
    assert caught.value.frame == FRAMES
    with pytest.raises(BadDataError, match=r"the last frame is at 3.560 s, expected 91 frames from 0.000 s"):
        VideoReader(video).check_range(0.0, FRAMES + 1, FPS)


def test_a_file_without_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(BadDataError, match=r"no video stream"):
        VideoReader(tmp_path / "sound.mp4")


def open_files(folder: Path) -> int:
    """Files below a folder that this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            count += str(link.readlink()).startswith(str(folder))
    return count


def test_decoders_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acrlpd.data.sources.video._MAX_IDLE_READERS", 3)
    original = write_video(tmp_path / "0.mp4", "h264", {"g": "12"}, list(range(4)))
    paths = [tmp_path / f"{k}.mp4" for k in range(12)]
    for path in paths[1:]:
        os.link(original, path)
    pool = VideoPool()
    for path in paths * 2:
        read_video_frames(pool, path, np.array([2]), fps=FPS)
    assert open_files(tmp_path) == 3
    pool.close()
    assert open_files(tmp_path) == 0


def test_a_closed_reader_frees_its_decoder_at_once(video: Path) -> None:
    """Decoders hold megabytes; waiting for the garbage collector let them pile up."""
    gc.disable()
    try:
        reader = VideoReader(video)
        reader.frame(0.4, FPS)
        reference = weakref.ref(reader)
        reader.close()
        del reader
        assert reference() is None
    finally:
        gc.enable()


def test_threads_share_a_file_without_mixing_frames(video: Path) -> None:
    pool = VideoPool()

    def read(seed: int) -> list[tuple[int, int, int]]:
        ts = np.random.default_rng(seed).integers(0, FRAMES, 25)
        return [frame_codes.decode(read_video_frames(pool, video, ts[k : k + 1], fps=FPS)[0]) for k in range(25)]

    with ThreadPoolExecutor(4) as threads:
        for seed, found in enumerate(threads.map(read, range(4))):
            ts = np.random.default_rng(seed).integers(0, FRAMES, 25)
            assert found == [(1, t, 2) for t in ts.tolist()]
