"""Broken ALOHA and DROID files: the error names the file, the episode and, where there is one, the frame."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import simplejpeg
from broken_copies import assert_bad, replace, replace_video

from acrlpd.data.sources.source import DatasetError, EpisodeError, open_source

CAMERA = "observation.images.cam_high"


def edit_hdf5(path: Path, edit: Callable[[h5py.File], None]) -> None:
    replace(path, path.read_bytes())
    with h5py.File(path, "r+") as file:
        edit(file)


def test_hdf5_with_a_nan_action(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_compressed")
    edit_hdf5(root / "episode_1.hdf5", lambda file: file["action"].write_direct(np.full((97, 14), np.nan, "f4")))
    with pytest.raises(EpisodeError, match=r"episode_1.hdf5: episode 1, frame 0: column 'action' is not finite"):
        open_source(root).episode(1)
    source = open_source(root, on_bad_episode="skip")
    assert (source.indices, source.skipped[0].index) == ((0,), 1)


def test_hdf5_without_a_camera_that_others_have(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    edit_hdf5(root / "episode_1.hdf5", lambda file: file["observations/images"].pop("cam_high"))
    source = open_source(root)
    with pytest.raises(EpisodeError, match=r"episode 1, camera '.*cam_high': .* missing.*cam_left_wrist"):
        source.episode(1).frame(CAMERA, 0)
    assert [e.index for e in open_source(root, on_bad_episode="skip").skipped] == [1]


def test_hdf5_with_lengths_that_disagree(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")

    def shorten(file: h5py.File) -> None:
        qpos, images = file["observations/qpos"][:-1], file["observations/images/cam_high"][:-2]
        del file["observations/qpos"]
        file["observations/qpos"] = qpos
        del file["observations/images/cam_high"]
        file["observations/images/cam_high"] = images

    edit_hdf5(root / "episode_1.hdf5", shorten)
    source = open_source(root)
    with pytest.raises(EpisodeError, match=r"episode 1: observations/qpos has 96 rows, action has 97"):
        source.episode(1)
    with pytest.raises(EpisodeError, match=r"episode 1, camera .*: 95 frames for 97 actions"):
        source.read_frames(1, CAMERA, np.array([0]))


def test_droid_with_lengths_that_disagree(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("droid_like")

    def shorten(file: h5py.File) -> None:
        values = file["observation/robot_state/joint_positions"][:-1]
        del file["observation/robot_state/joint_positions"]
        file["observation/robot_state/joint_positions"] = values

    folder = root / "success" / "2023-07-07" / "Fri_Jul__7_09_41_23_2023"
    edit_hdf5(folder / "trajectory.h5", shorten)
    with pytest.raises(EpisodeError, match=r"joint_positions has 96 rows, action/joint_velocity has 97"):
        open_source(root).episode(1)


def reshape(key: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[h5py.File], None]:
    def edit(file: h5py.File) -> None:
        values = file[key][()]
        del file[key]
        file[key] = change(values)

    return edit


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        ("sim_raw", "action", lambda x: x[:, :7], r"episode 1: column 'action' is \[7\] .* first episode \[14\]"),
        ("sim_raw", "observations/qpos", lambda x: x[:, 0], r"column 'observation.state' is \[\] .* \[14\]"),
        (
            "sim_raw",
            "observations/images/cam_high",
            lambda x: x[:, ::2],
            r"episode 1, camera '.*cam_high': frames are \[48, 128, 3\], in the first episode \[96, 128, 3\]",
        ),
        (
            "compressed",
            "observations/images/cam_high",
            lambda x: np.tile(np.frombuffer(simplejpeg.encode_jpeg(np.zeros((8, 16, 3), np.uint8)), "u1"), (97, 1)),
            r"frames are \[8, 16, 3\], in the first episode \[\d+, \d+, 3\]",
        ),
    ],
)
def test_hdf5_with_shapes_of_its_own(copy_dataset: Callable[[str], Path], name, key, change, message) -> None:
    root = copy_dataset(f"aloha_hdf5_{name}")
    edit_hdf5(root / "episode_1.hdf5", reshape(key, change))
    assert_bad(root, 1, message)


def test_droid_with_shapes_of_its_own(copy_dataset: Callable[[str], Path]) -> None:
    folder = Path("success") / "2023-07-07" / "Fri_Jul__7_09_41_23_2023"
    root = copy_dataset("droid_like")
    replace_video(root / folder / "recordings/MP4/12345678.mp4", rate=15, frames=97, height=64, width=96)
    assert_bad(root, 1, r"episode 1, camera 'wrist_image_left': frames are \[64, 96, 3\], in the first episode")
    edit_hdf5(root / folder / "trajectory.h5", reshape("observation/robot_state/joint_positions", lambda x: x[:, :6]))
    assert_bad(root, 1, r"joint_positions' is \[6\] per step, in the first episode \[7\]")


@pytest.mark.parametrize("success", ["False", np.bytes_("no"), np.array([True, False])])
def test_hdf5_with_a_success_that_is_neither_true_nor_false(copy_dataset: Callable[[str], Path], success) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    edit_hdf5(root / "episode_0.hdf5", lambda file: file.attrs.update(success=True))
    edit_hdf5(root / "episode_1.hdf5", lambda file: file.attrs.update(success=success))
    assert_bad(root, 1, r"episode_1.hdf5: episode 1: the attribute 'success' is .*, expected true or false")
    root, folder = copy_dataset("droid_like"), Path("success") / "2023-07-07" / "Fri_Jul__7_09_41_23_2023"
    edit_hdf5(root / folder / "trajectory.h5", lambda file: file.attrs.update(success=success))
    assert_bad(root, 1, r"trajectory.h5: episode 1: the attribute 'success' is .*, expected true or false")


def test_hdf5_with_one_value_for_all_steps(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    edit_hdf5(root / "episode_0.hdf5", lambda file: file.update(success=np.zeros(60, bool)))
    edit_hdf5(root / "episode_1.hdf5", lambda file: file.update(success=np.bool_(True)))
    assert_bad(root, 1, r"episode_1.hdf5: episode 1: success is a single value, expected one row per step")


@pytest.mark.parametrize(
    ("add", "found"),
    [
        (lambda images: images.create_dataset("depth", data=np.zeros((97, 8, 8), np.uint16)), r"\[97, 8, 8\]"),
        (lambda images: images.create_group("depth").create_group("high"), r"a group of \['high'\]"),
    ],
)
def test_hdf5_with_something_else_among_the_cameras(copy_dataset: Callable[[str], Path], add, found: str) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    for path in root.iterdir():
        edit_hdf5(path, lambda file: add(file["observations/images"]))
    with pytest.raises(DatasetError, match=rf"camera 'observation.images.depth': expected frames .*, found {found}"):
        open_source(root)


def test_hdf5_without_steps(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_compressed")

    def empty(file: h5py.File) -> None:
        datasets: list[str] = []
        file.visititems(lambda name, item: datasets.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in datasets:
            reshape(name, lambda x: x[:0])(file)

    edit_hdf5(root / "episode_0.hdf5", empty)
    assert_bad(root, 0, "episode_0.hdf5: episode 0: it has no steps")


def test_a_dataset_of_which_nothing_can_be_read(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    for path in root.iterdir():
        replace(path, b"not HDF5")
    with pytest.raises(DatasetError, match=r"none of 2 episodes can be read; the first: .*episode_0.hdf5"):
        open_source(root)


@pytest.mark.parametrize("name", ["episode_1_again.hdf5", "episode_01.hdf5"])
def test_a_file_more_gives_no_episode_another_number(name: str, copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    (root / name).write_bytes((root / "episode_1.hdf5").read_bytes())
    with pytest.raises(DatasetError, match=r"and 1 do not: episode_0?1(_again)?.hdf5. Move or rename"):
        open_source(root)


def test_files_without_a_number_are_numbered_in_their_order(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    lengths = open_source(root).lengths.tolist()
    for path in sorted(root.iterdir()):
        path.rename(root / path.name.replace("episode_", "towel "))
    source = open_source(root)
    assert source.indices == (0, 1) and source.lengths.tolist() == lengths
