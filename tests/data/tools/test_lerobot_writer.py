"""The LeRobot v3.0 writer: what it writes is laid out as by lerobot itself and reads back as it was given."""

import json
from pathlib import Path

import frame_codes
import numpy as np
import pyarrow.parquet as pq
import pytest

from acrlpd.data.sources.source import DatasetError, EpisodeError, Feature, open_source
from acrlpd.data.tools import lerobot_writer
from acrlpd.data.tools.lerobot_writer import LeRobotWriter

# The features of the aloha_v30 test dataset, which lerobot wrote.
FEATURES = {
    "observation.images.cam_high": Feature("video", (240, 320, 3)),
    "observation.state": Feature("float32", (14,)),
    "action": Feature("float32", (14,)),
    "next.reward": Feature("float32", ()),
    "next.done": Feature("bool", ()),
    "next.success": Feature("bool", ()),
}
SMALL = {
    "left": Feature("video", (64, 96, 3)),
    "right": Feature("video", (96, 128, 3)),
    "state": Feature("float64", (3,)),
    "count": Feature("int64", ()),
}


def write_aloha(writer: LeRobotWriter, episode: int, length: int) -> None:
    state, action = (frame_codes.state(episode, length, 14, ahead) for ahead in (0, 1))
    for t in range(length):
        last = t == length - 1
        success = last and frame_codes.success(episode)
        columns = {"observation.state": state[t], "action": action[t], "next.reward": float(success)}
        columns |= {"next.done": last, "next.success": success}
        writer.add_step(columns, {"observation.images.cam_high": frame_codes.encode(episode, t, 0, 240, 320)})


def write_small(writer: LeRobotWriter, episode: int, length: int, task: str | None = "do it") -> None:
    for t in range(length):
        frames = {
            "left": frame_codes.encode(episode, t, 0, 64, 96),
            "right": frame_codes.encode(episode, t, 1, 96, 128),
        }
        writer.add_step({"state": np.full(3, t / 3), "count": t}, frames)
    if task is not None:
        writer.end_episode(task)


def check_small(root: Path, lengths: list[int]) -> None:
    source = open_source(root)
    assert source.lengths.tolist() == lengths
    for episode in source:
        np.testing.assert_array_equal(episode.columns["count"], np.arange(episode.length))
        np.testing.assert_array_equal(episode.columns["state"][:, 1], np.arange(episode.length) / 3)
        for number, camera in enumerate(source.cameras):
            found = frame_codes.decode_all(episode.frames(camera, np.arange(episode.length)))
            assert found == [(episode.index, t, number) for t in range(episode.length)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written") / "aloha"
    with LeRobotWriter(root, fps=50, features=FEATURES, robot_type="aloha") as writer:
        for episode, task in enumerate(["Transfer cube", "Insert peg into socket", "Transfer cube", "Wave"]):
            write_aloha(writer, episode, 23 + episode)
            assert writer.end_episode(task) == episode
    return root


def test_it_reads_back(written: Path) -> None:
    source = open_source(written)
    assert (source.format, source.fps, source.lengths.tolist()) == ("LeRobot v3.0", 50, [23, 24, 25, 26])
    assert [episode.prompt for episode in source] == [
        "Transfer cube",
        "Insert peg into socket",
        "Transfer cube",
        "Wave",
    ]
    for episode in source:
        np.testing.assert_array_equal(
            episode.columns["action"], frame_codes.state(episode.index, episode.length, 14, 1)
        )
        assert episode.columns["next.success"][-1] == frame_codes.success(episode.index)
        codes = frame_codes.decode_all(episode.frames(source.cameras[0], np.arange(episode.length)))
        assert codes == [(episode.index, t, 0) for t in range(episode.length)]


def test_the_layout_is_lerobots(written: Path, datasets: Path) -> None:
    theirs = datasets / "aloha_v30"
    ours, real = (json.loads((root / "meta" / "info.json").read_text()) for root in (written, theirs))
    assert list(ours) == list(real)
    assert ours["features"] == real["features"]
    for key in ("codebase_version", "robot_type", "chunks_size", "fps", "data_path", "video_path"):
        assert ours[key] == real[key]
    assert (ours["total_episodes"], ours["total_frames"], ours["total_tasks"]) == (4, 98, 3)
    assert ours["splits"] == {"train": "0:4"}
    for file in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        assert pq.read_schema(written / file).equals(pq.read_schema(theirs / file)), file
    described = [
        json.loads(pq.read_schema(r / "data/chunk-000/file-000.parquet").metadata[b"huggingface"])
        for r in (written, theirs)
    ]
    assert described[0]["info"] == described[1]["info"]
    stats = [json.loads((root / "meta" / "stats.json").read_text()) for root in (written, theirs)]
    assert {k: set(v) for k, v in stats[0].items()} == {k: set(v) for k, v in stats[1].items()}
    files = {str(p.relative_to(written)) for p in written.rglob("*") if p.is_file()}
    assert files < {str(p.relative_to(theirs)) for p in theirs.rglob("*") if p.is_file()}


def test_statistics_are_those_of_the_columns(written: Path) -> None:
    source = open_source(written)
    stats = json.loads((written / "meta" / "stats.json").read_text())
    action = source.read_columns(["action"]).columns["action"].astype(np.float64)
    np.testing.assert_allclose(stats["action"]["mean"], action.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats["action"]["std"], action.std(axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats["action"]["min"], action.min(axis=0))
    assert stats["action"]["count"] == [98]
    frames = [e.frames(source.cameras[0], np.arange(0, e.length, 10)) for e in source]
    brightness = np.concatenate([f.reshape(-1, 3) for f in frames]).mean(axis=0) / 255
    np.testing.assert_allclose(np.squeeze(stats[source.cameras[0]]["mean"]), brightness, atol=0.02)
    row = pq.read_table(written / "meta/episodes/chunk-000/file-000.parquet").to_pylist()[2]
    np.testing.assert_allclose(row["stats/action/max"], source.episode(2).columns["action"].max(axis=0))


def test_full_files_are_followed_by_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each camera goes on to its next file on its own; rows and metadata too."""
    monkeypatch.setattr(lerobot_writer, "VIDEO_FILE_MB", 0)
    monkeypatch.setattr(lerobot_writer, "DATA_FILE_MB", 0)
    with LeRobotWriter(tmp_path / "data", fps=12.5, features=SMALL, codec="h264") as writer:
        for episode in range(3):
            write_small(writer, episode, 5 + episode)
        monkeypatch.setattr(lerobot_writer, "VIDEO_FILE_MB", 100)
        writer._videos["left"].close()  # as if it had been full: the files of the cameras differ from now on
        write_small(writer, 3, 8)
        writer._videos["right"].close()
        write_small(writer, 4, 9)
    assert len(list((tmp_path / "data" / "data" / "chunk-000").iterdir())) == 5
    check_small(tmp_path / "data", [5, 6, 7, 8, 9])
    table = pq.read_table(tmp_path / "data/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["videos/left/file_index"] for row in table] != [row["videos/right/file_index"] for row in table]


def test_a_discarded_episode_leaves_no_trace(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "data", fps=10, features=SMALL, codec="h264") as writer:
        write_small(writer, 0, 6)
        write_small(writer, 63, 4, task=None)
        writer.discard_episode()
        write_small(writer, 1, 7)
        write_small(writer, 62, 3, task=None)
    check_small(tmp_path / "data", [6, 7])


@pytest.mark.parametrize(
    ("name", "feature", "message"),
    [
        ("frame_index", Feature("int64", ()), "added by the writer"),
        ("action/joint", Feature("float32", (7,)), "no '/' in the names"),
        ("matrix", Feature("float32", (2, 2)), "not a number or a vector"),
        ("camera", Feature("video", (65, 64, 3)), "even sizes"),
    ],
)
def test_features_that_cannot_be_written(tmp_path: Path, name: str, feature: Feature, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LeRobotWriter(tmp_path / "data", fps=10, features={name: feature})


def test_steps_that_do_not_fit_the_declaration(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "data", fps=10, features={"state": Feature("float32", (3,))})
    with pytest.raises(ValueError, match=r"missing or unknown: .*'action', 'state'"):
        writer.add_step({"action": np.zeros(3)}, {})
    with pytest.raises(ValueError, match=r"state has shape \[4\], declared \[3\]"):
        writer.add_step({"state": np.zeros(4)}, {})
    with pytest.raises(ValueError, match=r"at least one step"):
        writer.end_episode("nothing")


def test_an_existing_dataset_is_not_written_over(written: Path) -> None:
    with pytest.raises(DatasetError, match=r"not empty"):
        LeRobotWriter(written, fps=50, features=FEATURES)


def test_many_steps_at_once_are_the_same_steps(tmp_path: Path) -> None:
    lengths = [24, 11]
    with LeRobotWriter(tmp_path / "single", fps=10, features=SMALL, codec="h264") as writer:
        for episode, length in enumerate(lengths):
            write_small(writer, episode, length)
    with LeRobotWriter(tmp_path / "many", fps=10, features=SMALL, codec="h264") as writer:
        for episode, length in enumerate(lengths):
            steps = np.arange(length)
            columns = {"state": np.repeat(steps[:, None] / 3, 3, axis=1), "count": steps}
            sizes = {"left": (64, 96), "right": (96, 128)}
            frames = {
                camera: np.stack([frame_codes.encode(episode, t, number, *size) for t in steps])
                for number, (camera, size) in enumerate(sizes.items())
            }
            writer.add_steps(columns, frames)
            writer.end_episode("do it")
    # An encoder with several threads need not write the same bytes twice, but always the same pictures.
    check_small(tmp_path / "many", lengths)
    check_small(tmp_path / "single", lengths)
    for name in ("meta/stats.json", "meta/info.json", "data/chunk-000/file-000.parquet"):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "single" / name).read_bytes(), name


def test_cameras_that_are_shorter_than_the_columns_are_refused(tmp_path: Path) -> None:
    frames = {"left": np.zeros((2, 64, 96, 3), np.uint8), "right": np.zeros((3, 96, 128, 3), np.uint8)}
    with (
        LeRobotWriter(tmp_path / "short", fps=10, features=SMALL, codec="h264") as writer,
        pytest.raises(ValueError, match=r"equally many steps; found \[2, 3\]"),
    ):
        writer.add_steps({"state": np.zeros((3, 3)), "count": np.arange(3)}, frames)


def test_every_flipped_bit_in_the_columns_is_found(tmp_path: Path) -> None:
    """The writer adds checksums to the pages of its parquet files, which lerobot itself does not."""
    with LeRobotWriter(tmp_path, fps=10, features={"action": Feature("float32", (7,))}) as writer:
        for step in np.random.default_rng(0).normal(size=(40, 7)).astype(np.float32):
            writer.add_step({"action": step}, {})
        writer.end_episode("wave")
    path = tmp_path / "data" / "chunk-000" / "file-000.parquet"
    sound, column = path.read_bytes(), pq.read_metadata(path).row_group(0).column(0)
    start = column.dictionary_page_offset
    for place in np.random.default_rng(0).integers(start + 100, start + 40 * 7 * 4, 20).tolist():
        damaged = bytearray(sound)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(EpisodeError, match=r"file-000.parquet: episode 0: not a readable parquet file.*CRC"):
            open_source(tmp_path).episode(0)
