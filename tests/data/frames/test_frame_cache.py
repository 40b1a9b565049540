"""The frame cache: the same pixels as resizing, whatever happens while it is built or afterwards."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from acrlpd.data.frames import cache_builder as frame_cache_builder
from acrlpd.data.frames.cache_builder import build_frame_cache
from acrlpd.data.frames.decoded import open_frame_store
from acrlpd.data.frames.store import MANIFEST, FrameCache, resize_with_pad
from acrlpd.data.sources.source import DatasetError, EpisodeError, EpisodeSource, open_source
from acrlpd.data.tools.inspect import validate_cache

SIZE = {"height": 40, "width": 56}
FRAME_BYTES = 40 * 56 * 3


@pytest.fixture(scope="module")
def source(datasets: Path) -> EpisodeSource:
    return open_source(datasets / "libero_v30")


@pytest.fixture(scope="module")
def built(source: EpisodeSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    build(source, directory)
    return directory


@pytest.fixture
def cache_dir(built: Path, tmp_path: Path) -> Path:
    """A finished raw cache of the source, to be damaged at will."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """About two episodes per shard."""
    monkeypatch.setattr(frame_cache_builder, "SHARD_BYTES", 100 * FRAME_BYTES)


def build(source: EpisodeSource, directory: Path, **options) -> dict[int, str]:
    return build_frame_cache(source, directory, **SIZE, **options)


def all_frames(source: EpisodeSource, camera: str) -> tuple[np.ndarray, np.ndarray]:
    """Position and step of every frame of a source, in a mixed order."""
    episodes = np.repeat(np.arange(len(source)), source.lengths)
    ts = np.concatenate([np.arange(length) for length in source.lengths])
    order = np.random.default_rng(0).permutation(len(ts))
    return episodes[order], ts[order]


def expected_frames(source: EpisodeSource, camera: str, episodes: np.ndarray, ts: np.ndarray) -> np.ndarray:
    whole = [source.episode(i).frames(camera, np.arange(n)) for i, n in enumerate(source.lengths)]
    small = [resize_with_pad(frames, **SIZE) for frames in whole]
    return np.stack([small[i][t] for i, t in zip(episodes, ts, strict=True)])


def check_frames(cache: FrameCache, source: EpisodeSource) -> None:
    for camera in source.cameras:
        episodes, ts = all_frames(source, camera)
        out = np.zeros((len(ts), 40, 56, 3), np.uint8)
        cache.read_into(camera, episodes, ts, out)
        np.testing.assert_array_equal(out, expected_frames(source, camera, episodes, ts))


def files_of(directory: Path) -> dict[str, bytes]:
    found = (p for p in directory.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(directory)): p.read_bytes() for p in found}


@pytest.mark.usefixtures("small_shards")
def test_a_raw_cache_holds_the_resized_frames_exactly(source: EpisodeSource, tmp_path: Path) -> None:
    assert build(source, tmp_path) == {}
    cache = FrameCache(tmp_path, source, cameras=source.cameras, **SIZE)
    assert len(cache.shards) > 4
    check_frames(cache, source)
    assert cache.verify() == []
    cache.close()


@pytest.mark.usefixtures("small_shards")
def test_a_jpeg_cache_is_close_and_smaller(source: EpisodeSource, tmp_path: Path) -> None:
    build(source, tmp_path, encoding="jpeg")
    cache = FrameCache(tmp_path, source, cameras=("image",), **SIZE)
    episodes, ts = all_frames(source, "image")
    out = np.zeros((len(ts), 40, 56, 3), np.uint8)
    cache.read_into("image", episodes, ts, out)
    difference = np.abs(out.astype(int) - expected_frames(source, "image", episodes, ts))
    assert difference.mean() < 2
    assert sum(shard.bytes for shard in cache.shards) < 0.6 * 2 * len(ts) * FRAME_BYTES


def test_one_interface_for_cache_decoder_and_pool(source: EpisodeSource, cache_dir: Path) -> None:
    kinds = {"cache_dir": cache_dir}, {}, {"episodes_per_memory_pool": 6}
    episodes, ts = np.array([5, 0, 3, 3, 0]), np.array([44, 0, 7, 60, 0])
    found = []
    for kind in kinds:
        store = open_frame_store(source, **SIZE, **kind)
        assert store.capacity == 6
        assert store.prepare(0).tolist() == list(range(6))
        out = np.zeros((5, 40, 56, 3), np.uint8)
        store.read_into("wrist_image", episodes, ts, out)
        found.append(out)
        store.close()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert found[0].any()


CHILD = """
import sys, time
from pathlib import Path
from acrlpd.data.frames import cache_builder as frame_cache_builder
from acrlpd.data.sources import lerobot
from acrlpd.data.sources.source import open_source

frame_cache_builder.SHARD_BYTES = int(sys.argv[3])
read = lerobot.LeRobotSource.read_frames

def read_two_shards(*args):
    # The third shard is never finished: the process is still at work when the test kills it.
    while len(list(Path(sys.argv[2]).glob("*/*.json"))) >= 2:
        time.sleep(0.05)
    return read(*args)

lerobot.LeRobotSource.read_frames = read_two_shards
source = open_source(sys.argv[1])
frame_cache_builder.build_frame_cache(
    source, Path(sys.argv[2]), height=40, width=56, workers=2
)
"""


@pytest.mark.usefixtures("small_shards")
def test_a_kill_loses_nothing_that_was_finished(source: EpisodeSource, tmp_path: Path) -> None:
    killed, clean = tmp_path / "killed", tmp_path / "clean"
    command = [sys.executable, "-c", CHILD, str(source.root), str(killed), str(100 * FRAME_BYTES)]
    child = subprocess.Popen(command)
    while len(list(killed.glob("*/*.json"))) < 2:
        assert child.poll() is None, "the child ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (killed / MANIFEST).exists()
    with pytest.raises(DatasetError, match=r"no finished frame cache.*acrlpd data cache"):
        FrameCache(killed, source, cameras=source.cameras, **SIZE)
    finished = {p: p.with_suffix(".frames").stat().st_mtime_ns for p in killed.glob("*/*.json")}
    assert finished
    build(source, killed)
    for record, written in finished.items():
        assert record.with_suffix(".frames").stat().st_mtime_ns == written, "a finished shard was made again"
    build(source, clean)
    assert files_of(killed) == files_of(clean)


def test_building_again_does_nothing(source: EpisodeSource, tmp_path: Path) -> None:
    build(source, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.frames")}
    build(source, tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.frames")} == before


@pytest.mark.parametrize("kind", ["cache", "decoder", "pool"])
def test_a_step_outside_its_episode_is_never_a_neighbours_frame(
    source: EpisodeSource, cache_dir: Path, kind: str
) -> None:
    options = {}
    if kind == "cache":
        options = {"cache_dir": cache_dir}
    elif kind == "pool":
        options = {"episodes_per_memory_pool": 6}
    store = open_frame_store(source, **SIZE, **options)
    store.prepare(0)
    out = np.zeros((2, 40, 56, 3), np.uint8)
    for t in (-1, 47):
        with pytest.raises(IndexError, match=r"has steps 0..46, asked for"):
            store.read_into("image", np.array([0, 1]), np.array([0, t]), out)


def test_only_one_builder_at_a_time(source: EpisodeSource, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(source.root), str(tmp_path), str(100 * FRAME_BYTES)]
    child = subprocess.Popen(command)
    try:
        while not (tmp_path / "plan.json").exists():
            assert child.poll() is None, "the child ended before it had a plan"
            time.sleep(0.01)
        with pytest.raises(DatasetError, match=r"another process is building"):
            build(source, tmp_path)
    finally:
        child.kill()
        child.wait()


def open_files(directory: Path) -> list[Path]:
    """The files below a directory that this process has open."""
    gc.collect()
    links = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    return [path for path in links if path.is_relative_to(directory)]


def test_a_cache_that_cannot_be_opened_leaves_no_file_open(source: EpisodeSource, cache_dir: Path) -> None:
    FrameCache(cache_dir, source, cameras=source.cameras, **SIZE)  # nobody keeps it
    assert open_files(cache_dir) == []
    shard = cache_dir / "wrist_image" / "00000.frames"
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(DatasetError, match="the table behind the frames does not match"):
        FrameCache(cache_dir, source, cameras=source.cameras, **SIZE)
    assert open_files(cache_dir) == []


def test_a_cache_serves_only_the_dataset_it_was_made_from(
    source: EpisodeSource, datasets: Path, cache_dir: Path
) -> None:
    other = open_source(datasets / "libero_v21")
    with pytest.raises(DatasetError, match=r"made from another dataset than .*libero_v21"):
        FrameCache(cache_dir, other, cameras=other.cameras, **SIZE)
    with pytest.raises(DatasetError, match=r"another dataset, size or encoding"):
        build(other, cache_dir)
    with pytest.raises(DatasetError, match=r"frames are 40x56, the model wants 224x224; .* --height 224 --width 224$"):
        FrameCache(cache_dir, source, cameras=source.cameras, height=224, width=224)
    with pytest.raises(DatasetError, match=r"another dataset, size or encoding"):
        build(source, cache_dir, encoding="jpeg")


def test_a_camera_that_is_not_in_the_dataset_leaves_nothing_behind(source: EpisodeSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no camera 'imagee'; it has image, wrist_image"):
        build(source, tmp_path / "cache", cameras=("imagee",))
    assert not (tmp_path / "cache").exists()


def test_a_camera_that_is_not_in_the_cache(source: EpisodeSource, tmp_path: Path) -> None:
    build(source, tmp_path, cameras=("image",))
    with pytest.raises(DatasetError, match=r"no camera 'wrist_image', it has \['image'\]"):
        FrameCache(tmp_path, source, cameras=source.cameras, **SIZE)


def test_a_directory_with_other_things_is_not_built_into(source: EpisodeSource, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(DatasetError, match=r"not empty and not a frame cache"):
        build(source, tmp_path)


def test_a_truncated_shard_is_found_at_open(source: EpisodeSource, cache_dir: Path) -> None:
    shard = next((cache_dir / "image").glob("*.frames"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(DatasetError, match=r"00000.frames: has \d+ bytes, the manifest says \d+"):
        FrameCache(cache_dir, source, cameras=source.cameras, **SIZE)


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_a_flipped_bit_is_found_when_the_frame_is_first_read(
    source: EpisodeSource, tmp_path: Path, encoding: str
) -> None:
    """One bit of one frame: the other frames can be read, this one is refused, and one command repairs the cache."""
    build(source, tmp_path, encoding=encoding)
    before = files_of(tmp_path)
    cache = FrameCache(tmp_path, source, cameras=("image",), **SIZE)
    place = int(cache._tables[0][0][7]) + 2  # inside of frame 7 of the first episode
    cache.close()
    flip(tmp_path / "image" / "00000.frames", place)
    cache = FrameCache(tmp_path, source, cameras=("image",), **SIZE)
    out = np.zeros((1, 40, 56, 3), np.uint8)
    cache.read_into("image", np.array([0]), np.array([6]), out)
    message = r"image/00000.frames: damaged, frame 7 does not match its checksum; delete this file and manifest.json"
    for _ in range(2):
        with pytest.raises(DatasetError, match=message):
            cache.read_into("image", np.array([0]), np.array([7]), out)
    cache.close()
    [problem] = validate_cache(tmp_path, source)
    assert "image/00000.frames: damaged, frame 7" in problem
    (tmp_path / "image" / "00000.frames").unlink()
    (tmp_path / MANIFEST).unlink()
    untouched = (tmp_path / "wrist_image" / "00000.frames").stat().st_mtime_ns
    build(source, tmp_path, encoding=encoding)
    assert validate_cache(tmp_path, source) == []
    assert files_of(tmp_path) == before
    assert (tmp_path / "wrist_image" / "00000.frames").stat().st_mtime_ns == untouched


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_every_flipped_bit_of_a_cache_is_found(source: EpisodeSource, tmp_path: Path, encoding: str) -> None:
    build(source, tmp_path, encoding=encoding)
    rng = np.random.default_rng(0)
    for file in ("image/00000.frames", "wrist_image/00000.frames", MANIFEST):
        path = tmp_path / file
        size = path.stat().st_size
        # Anywhere, and in the tables at the end of a shard.
        for place in [*rng.integers(0, size, 6).tolist(), *(size - 1 - rng.integers(0, 2000, 4)).tolist()]:
            bit = int(rng.integers(8))
            flip(path, place, bit)
            [problem] = validate_cache(tmp_path, source)
            assert str(path) in problem
            flip(path, place, bit)
    assert validate_cache(tmp_path, source) == []


@pytest.mark.parametrize("damage", ["{", "{}", '{"spec": {}, "shards": [], "skipped": {}}'])
def test_a_damaged_manifest(source: EpisodeSource, cache_dir: Path, damage: str) -> None:
    (cache_dir / MANIFEST).write_text(damage)
    with pytest.raises(DatasetError, match=r"manifest.json: damaged"):
        FrameCache(cache_dir, source, cameras=source.cameras, **SIZE)


def broken_video(copy_dataset) -> Path:
    """Episode 3 of aloha_v21 has noise in the middle of its video, which only decoding finds."""
    root = copy_dataset("aloha_v21")
    path = root / "videos" / "chunk-000" / "observation.images.cam_high" / "episode_000003.mp4"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2] + bytes(4000) + data[len(data) // 2 + 4000 :])
    return root


def test_an_undecodable_episode_stops_the_build(copy_dataset, tmp_path: Path) -> None:
    source = open_source(broken_video(copy_dataset))
    with pytest.raises(EpisodeError, match=r"episode_000003.mp4: episode 3, frame \d+"):
        build(source, tmp_path / "cache")
    assert not (tmp_path / "cache" / MANIFEST).exists()


def test_an_undecodable_episode_is_left_out_when_agreed(copy_dataset, tmp_path: Path) -> None:
    root = broken_video(copy_dataset)
    source = open_source(root, on_bad_episode="skip")
    assert len(source) == 12
    skipped = build(source, tmp_path / "cache")
    assert list(skipped) == [3]
    cache = FrameCache(tmp_path / "cache", source, cameras=source.cameras, **SIZE)
    assert cache.source.indices == (0, 1, 2, *range(4, 12))
    assert "episode 3, frame" in cache.source.skipped[0].reason
    camera = source.cameras[0]
    out = np.zeros((2, 40, 56, 3), np.uint8)
    cache.read_into(camera, np.array([3, 10]), np.array([5, 9]), out)  # positions: episodes 4 and 11
    for frame, (index, t) in zip(out, [(4, 5), (11, 9)], strict=True):
        full = source.read_frames(index, camera, np.array([t]))
        np.testing.assert_array_equal(frame, resize_with_pad(full, **SIZE)[0])
    with pytest.raises(DatasetError, match=r"1 episodes could not be decoded .* on_bad_episode=skip"):
        FrameCache(tmp_path / "cache", open_source(root), cameras=source.cameras, **SIZE)


def test_a_part_of_the_source_can_be_served(source: EpisodeSource, cache_dir: Path) -> None:
    part = source.without({0: "not wanted", 2: "not wanted"})
    cache = FrameCache(cache_dir, part, cameras=("image",), **SIZE)
    out = np.zeros((1, 40, 56, 3), np.uint8)
    cache.read_into("image", np.array([1]), np.array([4]), out)
    np.testing.assert_array_equal(out, resize_with_pad(source.read_frames(3, "image", np.array([4])), **SIZE))


def test_a_buffer_of_the_wrong_shape_is_refused(source: EpisodeSource, cache_dir: Path) -> None:
    cache = FrameCache(cache_dir, source, cameras=("image",), **SIZE)
    with pytest.raises(ValueError, match=r"out must be uint8 \[2, 40, 56, 3\], found uint8 \[1, 40, 56, 3\]"):
        cache.read_into("image", np.array([0, 1]), np.array([0, 0]), np.zeros((1, 40, 56, 3), np.uint8))


@pytest.mark.usefixtures("small_shards")
def test_a_cache_begun_with_error_goes_on_with_skip(copy_dataset, tmp_path: Path) -> None:
    root, directory = copy_dataset("libero_v21"), tmp_path / "cache"
    (root / "data" / "chunk-000" / "episode_000004.parquet").unlink()
    with pytest.raises(EpisodeError, match="episode 4"):
        build(open_source(root), directory, workers=1)
    finished = {path: path.stat().st_mtime_ns for path in directory.rglob("*.frames")}
    assert finished
    source = open_source(root, on_bad_episode="skip")
    assert build(source, directory) == {}  # what the source lists is not listed again
    assert finished.items() <= {path: path.stat().st_mtime_ns for path in directory.rglob("*.frames")}.items()
    cache = FrameCache(directory, source, cameras=source.cameras, **SIZE)
    assert cache.source.indices == source.indices == (0, 1, 2, 3, 5)
    check_frames(cache, source)
    build(source, tmp_path / "fresh")
    with pytest.raises(DatasetError, match=r"begun without the episodes \[4\].*on_bad_episode=skip"):
        build(open_source(root), tmp_path / "fresh")
