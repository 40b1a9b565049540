"""Episodes of a run on disk: what was written is what is read, whatever happens in between."""

import gc
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acrlpd.data.pipeline.replay import Replay, ReplayError, verify_replay
from acrlpd.data.sources.source import DatasetError, EpisodeError, Feature

CAMERA = "observation.images.side"
COLUMNS = {
    "observation.state": Feature("float32", (3,)),
    "action": Feature("float32", (2,)),
    "next.reward": Feature("float32", ()),
    "next.done": Feature("bool", ()),
    "next.success": Feature("bool", ()),
}
FEATURES = {**COLUMNS, CAMERA: Feature("video", (16, 24, 3))}


def lived(length: int, seed: int = 0, *, cameras: bool = True) -> dict[str, np.ndarray]:
    """An episode; its frames have smooth colours that tell their steps apart."""
    rng = np.random.default_rng(seed)
    done = np.arange(length) == length - 1
    columns = {
        "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
        "action": rng.uniform(-1, 1, (length, 2)).astype(np.float32),
        "next.reward": -rng.uniform(size=length).astype(np.float32),
        "next.done": done,
        "next.success": done & bool(seed % 2),
    }
    if cameras:
        slope = np.linspace(0, 60, 24)[None, None, :, None]
        colour = np.stack([20 * np.arange(length), np.full(length, 10 * (seed % 15)), np.full(length, 90)], -1)
        columns[CAMERA] = np.broadcast_to(colour[:, None, None] + slope, (length, 16, 24, 3)).astype(np.uint8)
    return columns


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_was_written_is_read_in_the_order_of_admission(tmp_path_factory, data: st.DataObject) -> None:
    lengths = data.draw(st.dictionaries(st.integers(0, 10**7), st.integers(1, 9), min_size=1, max_size=5))
    episodes = {number: lived(length, number, cameras=False) for number, length in lengths.items()}
    root = tmp_path_factory.mktemp("replay")
    writer = Replay(root, COLUMNS, fps=10)
    for number, columns in episodes.items():
        writer.write(number, columns, f"task {number % 2}")
    order = data.draw(st.permutations(sorted(episodes)))
    cut = data.draw(st.integers(0, len(order)))
    replay = Replay(root, COLUMNS, fps=10)
    assert replay.scan() == sorted(episodes)
    assert len(replay) == 0  # on disk is not yet part of the run
    replay.admit(order[:cut])
    replay.admit(order[cut:])
    assert replay.indices == tuple(order)
    assert replay.lengths.tolist() == [lengths[number] for number in order]
    table = replay.read_columns()
    for name in COLUMNS:
        expected = np.concatenate([episodes[number][name] for number in order])
        assert table.columns[name].dtype == expected.dtype
        np.testing.assert_array_equal(table.columns[name], expected)
    prompts = [table.prompts[table.prompt_index[offset]] for offset in table.offsets[:-1]]
    assert prompts == [f"task {number % 2}" for number in order]
    assert replay.episode(0).index == order[0]


def test_frames_are_those_of_their_steps(tmp_path: pathlib.Path) -> None:
    replay = Replay(tmp_path, FEATURES, fps=10)
    episodes = {number: lived(10, number) for number in (3, 1)}
    for number, columns in episodes.items():
        replay.write(number, columns, "go right")
    again = Replay(tmp_path, FEATURES, fps=10)
    again.admit([1, 3])
    ts = np.array([9, 0, 4, 4])
    for position, number in enumerate(again.indices):
        found = again.episode(position).frames(CAMERA, ts)
        difference = np.abs(found.astype(int) - episodes[number][CAMERA][ts])
        assert difference.max() < 10 and difference.mean() < 2  # neighbouring steps are 20 apart
        assert again.check(number) == 10
    with pytest.raises(IndexError, match=r"steps 0\.\.9, asked for 10"):
        again.episode(0).frames(CAMERA, [10])


def test_an_episode_costs_no_open_file(tmp_path: pathlib.Path) -> None:
    replay = Replay(tmp_path, FEATURES, fps=10)
    for number in range(20):
        replay.write(number, lived(2, number), "go right")
    replay.admit(range(20))
    handles = pathlib.Path("/proc/self/fd")
    before = len(list(handles.iterdir()))
    for episode in replay:
        episode.frames(CAMERA, [0, 1])
    assert len(list(handles.iterdir())) == before


def test_what_a_kill_leaves_behind_is_no_episode(tmp_path: pathlib.Path) -> None:
    replay = Replay(tmp_path, FEATURES, fps=10)
    replay.write(0, lived(4), "go right")
    (tmp_path / "episode-00000001-4.npz.tmp").write_bytes(b"half of it")
    (tmp_path / f"episode-00000002.{CAMERA}.jpegs").write_bytes(b"frames without columns")
    (tmp_path / f"episode-00000003.{CAMERA}.jpegs.tmp").write_bytes(b"")
    (tmp_path / "round-000000.json").write_text("{}")
    again = Replay(tmp_path, FEATURES, fps=10)
    assert again.scan() == [0]
    again.write(2, lived(3, 2), "go right")  # the same episode, lived again
    assert again.scan() == [0, 2]
    assert again.check(2) == 3


def test_a_damaged_episode_names_its_file(tmp_path: pathlib.Path) -> None:
    replay = Replay(tmp_path, FEATURES, fps=10)
    for number in range(4):
        replay.write(number, lived(4, number), "go right")
    shard = tmp_path / "episode-00000000-4.npz"
    shard.write_bytes(shard.read_bytes()[:-100])
    (tmp_path / "episode-00000001-4.npz").write_bytes(b"")
    frames = tmp_path / f"episode-00000002.{CAMERA}.jpegs"
    frames.write_bytes(frames.read_bytes()[:-100])
    (tmp_path / f"episode-00000003.{CAMERA}.jpegs").unlink()
    again = Replay(tmp_path, FEATURES, fps=10)
    again.admit(range(4))
    for number in (0, 1):
        with pytest.raises(EpisodeError, match=rf"episode-0000000{number}-4.npz: episode {number}: .*cannot be read"):
            again.read_columns(["action"])
        again = again.without({number: "damaged"})
    for number in (2, 3):
        message = rf"episode-0000000{number}\.{CAMERA}\.jpegs: episode {number}, .*camera"
        with pytest.raises(EpisodeError, match=message):
            again.read_frames(number, CAMERA, np.array([3]))
        with pytest.raises(EpisodeError, match=message):
            again.check(number)
    files = ["episode-00000000-4.npz", "episode-00000001-4.npz", frames.name, frames.name.replace("2", "3")]
    for problem, file in zip(verify_replay(tmp_path), files, strict=True):
        assert problem.startswith(f"{tmp_path / file}: episode")


def test_every_flipped_bit_is_found(tmp_path: pathlib.Path) -> None:
    """Any bit of any file of an episode: reading refuses the episode, and verifying names the file."""
    Replay(tmp_path, FEATURES, fps=10).write(0, lived(6), "go right")
    assert list(verify_replay(tmp_path)) == []
    rng = np.random.default_rng(0)
    for path in sorted(tmp_path.iterdir()):
        sound = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(sound)
            damaged[rng.integers(len(sound))] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            replay = Replay(tmp_path, FEATURES, fps=10)
            with pytest.raises(EpisodeError, match=rf"{path.name}: episode 0.*checksum.*restore it or start the run"):
                replay.columns(0, ["action"])
                replay.read_frames(0, CAMERA, np.arange(6))
            [problem] = verify_replay(tmp_path)
            assert problem.startswith(str(path))
        path.write_bytes(sound)
    assert list(verify_replay(tmp_path)) == []
    assert list(verify_replay(tmp_path / "a run without an online phase")) == []


def test_more_bytes_than_frames_are_found(tmp_path: pathlib.Path) -> None:
    Replay(tmp_path, FEATURES, fps=10).write(0, lived(6), "go right")
    path = tmp_path / f"episode-00000000.{CAMERA}.jpegs"
    path.write_bytes(path.read_bytes() + b"more")
    [problem] = verify_replay(tmp_path)
    assert str(path) in problem and "bytes of frames, expected" in problem


def test_an_episode_of_another_length_than_its_name_says_is_named(tmp_path: pathlib.Path) -> None:
    Replay(tmp_path, COLUMNS, fps=10).write(3, lived(6, cameras=False), "go right")
    (tmp_path / "episode-00000003-6.npz").rename(tmp_path / "episode-00000003-5.npz")
    replay = Replay(tmp_path, COLUMNS, fps=10)
    replay.admit([3])
    message = r"episode-00000003-5\.npz: episode 3: .* has 6 steps, the name of the file says 5"
    with pytest.raises(EpisodeError, match=message):
        replay.read_columns(["action"])
    [problem] = verify_replay(tmp_path)
    assert "episode-00000003-5.npz" in problem and "the name of the file says 5" in problem


def test_two_files_of_one_episode_are_both_named(tmp_path: pathlib.Path) -> None:
    replay = Replay(tmp_path, COLUMNS, fps=10)
    replay.write(3, lived(6, cameras=False), "go right")
    Replay(tmp_path / "other", COLUMNS, fps=10).write(3, lived(5, cameras=False), "go right")
    (tmp_path / "other" / "episode-00000003-5.npz").rename(tmp_path / "episode-00000003-5.npz")
    names = ["episode-00000003-5.npz", "episode-00000003-6.npz"]
    [problem] = verify_replay(tmp_path)
    assert problem.startswith(f"{tmp_path / names[0]} and {tmp_path / names[1]} are both the same episode; remove")
    for opened in (lambda: Replay(tmp_path, COLUMNS, fps=10), replay.scan):
        with pytest.raises(ReplayError, match="are both the same episode") as error:
            opened()
        assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros((4, 3), np.float32)}, r"action must have shape \(2,\) per step; found \(3,\)"),
        ({"next.reward": np.zeros((4, 1), np.float32)}, r"next.reward must have shape \(\) per step; found \(1,\)"),
        ({CAMERA: np.zeros((4, 24, 16, 3), np.uint8)}, r"side must have shape \(16, 24, 3\) .* found \(24, 16, 3\)"),
        ({CAMERA: None}, r"side must have shape \(16, 24, 3\) per step; found None"),
        ({"action": np.zeros((5, 2), np.float32)}, "action has 5 steps, the others 4"),
    ],
)
def test_an_episode_of_another_environment_is_refused(tmp_path: pathlib.Path, change, message: str) -> None:
    replay = Replay(tmp_path, FEATURES, fps=10)
    columns = {name: value for name, value in (lived(4) | change).items() if value is not None}
    with pytest.raises(ReplayError, match=message):
        replay.write(0, columns, "go right")
    assert replay.scan() == []


# The limit on the size of files stands in for the disk.
FULL = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[2])
from test_replay import FEATURES, Replay, lived
replay = Replay(pathlib.Path(sys.argv[1]), FEATURES, fps=10)
resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))
replay.write(0, lived(3), "go right")
replay.write(1, lived(4), "go right")
replay.write(2, lived(1000), "go right")
"""


def test_threads_read_shards_at_the_same_time(tmp_path: pathlib.Path) -> None:
    """Python 3.11.7 and older cannot parse array headers in two threads, if one is held up by garbage collection.

    JAX has a callback there, in which threads take turns; this one makes sure that they do.
    """
    replay = Replay(tmp_path, COLUMNS, fps=10)
    for number in range(20):
        replay.write(number, lived(3, number, cameras=False), "go")
    replay.admit(range(20))
    threshold = gc.get_threshold()

    def next_thread(phase: str, info: dict[str, int]) -> None:
        time.sleep(1e-5)

    gc.callbacks.append(next_thread)
    gc.set_threshold(50)
    gc.freeze()  # what is there already is not looked at again and again
    try:
        for _ in range(60):
            assert replay.read_columns().offsets[-1] == 60
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        gc.callbacks.remove(next_thread)


def test_a_full_disk_costs_one_episode(tmp_path: pathlib.Path) -> None:
    here = str(pathlib.Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), here], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "ReplayError" in last and "episode 2 could not be written (File too large)" in last
    assert "The 2 episodes before it are complete; free some space and go on with --resume" in last
    assert not list(tmp_path.glob("*.tmp"))  # what could not be written takes no space
    replay = Replay(tmp_path, FEATURES, fps=10)
    assert [replay.check(number) for number in replay.scan()] == [3, 4]


def test_an_episode_that_somebody_removed_is_named(tmp_path: pathlib.Path) -> None:
    replay = Replay(tmp_path, COLUMNS, fps=10)
    for number in range(3):
        replay.write(number, lived(4, number, cameras=False), "task")
    (tmp_path / "episode-00000001-4.npz").unlink()
    with pytest.raises(DatasetError, match=r"the file of episode 1 is missing, episode-00000001-<steps>\.npz"):
        Replay(tmp_path, COLUMNS, fps=10).admit(range(3))
