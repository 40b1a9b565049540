"""HDF5 to LeRobot v3.0: nothing is lost, nothing piles up in memory."""

import shutil
from pathlib import Path

import frame_codes
import numpy as np
import pytest

from acrlpd.data.pipeline.labels import Labels, labels_path, load_labels
from acrlpd.data.sources.source import DatasetError, EpisodeError, EpisodeSource, open_source
from acrlpd.data.tools.convert import convert_to_lerobot
from acrlpd.data.tools.inspect import validate_source
from acrlpd.data.tools.label import label_list


def convert(source: EpisodeSource, output: Path, **options):
    return convert_to_lerobot(source, output, codec="h264", **options)


@pytest.mark.parametrize("name", ["aloha_hdf5_compressed", "aloha_hdf5_sim_raw", "droid_like"])
def test_the_conversion_equals_the_original(datasets: Path, tmp_path: Path, name: str) -> None:
    original = open_source(datasets / name)
    assert convert(original, tmp_path / "new", task="Transfer cube", robot_type="robot") == []
    converted = open_source(tmp_path / "new")
    assert (converted.format, converted.fps, len(converted)) == ("LeRobot v3.0", original.fps, len(original))
    assert set(converted.cameras) == set(original.cameras)
    for a, b in zip(original, converted, strict=True):
        assert (a.length, a.prompt or "Transfer cube") == (b.length, b.prompt)
        assert {n for n in a.columns if "/" not in n} <= set(b.columns)
        for column in set(a.columns) & set(b.columns):
            np.testing.assert_array_equal(a.columns[column], b.columns[column])
            assert a.columns[column].dtype == b.columns[column].dtype
        for camera in original.cameras:
            ts = np.arange(a.length)
            assert frame_codes.decode_all(a.frames(camera, ts)) == frame_codes.decode_all(b.frames(camera, ts))


def test_frames_are_read_in_small_blocks(datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(datasets / "aloha_hdf5_sim_raw")
    blocks: list[int] = []
    read = source.read_frames

    def counting(index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        blocks.append(len(ts))
        return read(index, camera, ts)

    monkeypatch.setattr(source, "read_frames", counting)
    convert(source, tmp_path / "new", task="Transfer cube")
    assert max(blocks) <= 32
    assert sum(blocks) == 3 * source.lengths.sum()


def test_without_a_prompt_the_task_must_be_said(datasets: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"episode 0 has no prompt; .*--task"):
        convert(open_source(datasets / "aloha_hdf5_sim_raw"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(copy_dataset, tmp_path: Path) -> None:
    root = copy_dataset("aloha_hdf5_compressed")
    path = root / "episode_1.hdf5"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2] + bytes(5000) + data[len(data) // 2 + 5000 :])
    with pytest.raises(EpisodeError, match=r"episode_1.hdf5: episode 1, frame \d+, .* not a readable JPEG"):
        convert(open_source(root), tmp_path / "new", task="x")
    assert not (tmp_path / "new").exists()
    skipped = convert(open_source(root, on_bad_episode="skip"), tmp_path / "new", task="x")
    assert [episode.index for episode in skipped] == [1]
    assert open_source(tmp_path / "new").lengths.tolist() == [60]
    assert {p.name for p in tmp_path.iterdir()} == {"aloha_hdf5_compressed", "new"}


def test_labels_go_along_under_the_new_numbers(copy_dataset, tmp_path: Path) -> None:
    root = copy_dataset("aloha_hdf5_compressed")
    source = open_source(root)
    Labels(labels_path(root), label_list(source, list(source.indices[:-1]), [source.indices[-1]])).save()
    path = root / "episode_0.hdf5"
    path.unlink()
    path.write_bytes(b"damaged")
    assert len(convert(open_source(root, on_bad_episode="skip"), tmp_path / "new", task="x")) == 1
    converted = open_source(tmp_path / "new")
    labels = load_labels(labels_path(converted.root), converted)
    assert labels is not None
    assert [labels.episodes[i].success for i in converted.indices] == [True] * (len(converted) - 1) + [False]
    with pytest.raises(
        DatasetError, match=r"new\.labels\.json: exists, and .*compressed\.labels\.json would replace it"
    ):
        shutil.rmtree(tmp_path / "new")
        convert(open_source(root, on_bad_episode="skip"), tmp_path / "new", task="x")


def test_a_conversion_of_nothing_is_no_dataset(copy_dataset, tmp_path: Path) -> None:
    root = copy_dataset("aloha_hdf5_compressed")
    for path in root.iterdir():
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[: len(data) // 2] + bytes(5000) + data[len(data) // 2 + 5000 :])
    with pytest.raises(DatasetError, match=r"none of 2 episodes could be converted; the first: .*episode 0, frame"):
        convert(open_source(root, on_bad_episode="skip"), tmp_path / "new", task="x")
    assert not (tmp_path / "new").exists()


def test_a_second_conversion_does_not_spoil_the_first(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(datasets / "aloha_hdf5_sim_raw")
    read, refused = source.read_frames, []

    def meddle(index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        if index == 1 and not refused:
            with pytest.raises(DatasetError, match=r"another process is converting to .*new") as caught:
                convert(open_source(datasets / "aloha_hdf5_sim_raw"), tmp_path / "new", task="x")
            refused.append(caught)
        return read(index, camera, ts)

    monkeypatch.setattr(source, "read_frames", meddle)
    convert(source, tmp_path / "new", task="Transfer cube")
    converted = open_source(tmp_path / "new")
    assert refused and validate_source(converted, frames="all") == []
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_what_is_lerobot_already_is_not_converted(datasets: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"is LeRobot v2.1 already"):
        convert(open_source(datasets / "libero_v21"), tmp_path / "new")
