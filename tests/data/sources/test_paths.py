"""What a dataset says about its files cannot lead out of the dataset."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from broken_copies import replace

from acrlpd.checksums import read_json_with_checksum, write_json_with_checksum
from acrlpd.data.frames.cache_builder import build_frame_cache
from acrlpd.data.frames.store import MANIFEST, FrameCache
from acrlpd.data.pipeline.replay import Replay
from acrlpd.data.sources.source import DatasetError, EpisodeError, Feature, open_source
from acrlpd.data.tools.lerobot_writer import LeRobotWriter

V21 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"


def edit_info(root: Path, **changes: object) -> None:
    path = root / "meta" / "info.json"
    replace(path, json.dumps(json.loads(path.read_text()) | changes).encode())


@pytest.mark.parametrize(
    "template",
    [
        "data/{episode_index:300000000d}.parquet",
        "data/{episode_index:>300000000}.parquet",
        "data/{episode_index:{episode_index}d}.parquet",
        "../outside/" + V21,
        "/etc/" + V21,
        "data/../../outside/{episode_index:06d}.parquet",
        "data/{episode_index.__class__}.parquet",
        "data/{episode_index!r}.parquet",
        "data/{0}.parquet",
        "data/{}.parquet",
        "data/{file_index:03d}.parquet",
        "data/{episode_index:06d",
        "data/\x1b[2J{episode_index:06d}.parquet",
        "",
        7,
    ],
)
def test_a_template_that_leads_elsewhere_is_refused(copy_dataset: Callable[[str], Path], template: object) -> None:
    root = copy_dataset("libero_v21")
    shutil.copytree(root / "data", root.parent / "outside" / "data")
    edit_info(root, data_path=template)
    with pytest.raises(DatasetError, match=r"meta/info.json: data_path is .*, expected a path made of episode_chunk"):
        open_source(root).episode(0)


@pytest.mark.parametrize("width", ["", ":d", ":06d", ":06"])
def test_the_widths_that_lerobot_writes_are_read(copy_dataset: Callable[[str], Path], width: str) -> None:
    root = copy_dataset("libero_v21")
    folder = root / "data" / "chunk-000"
    for index in range(6):
        name = f"{index:06d}" if "06" in width else str(index)
        (folder / f"episode_{index:06d}.parquet").rename(folder / f"{name}.parquet")
    edit_info(root, data_path=f"data/chunk-{{episode_chunk:03d}}/{{episode_index{width}}}.parquet")
    assert [episode.index for episode in open_source(root)] == list(range(6))


def test_a_camera_whose_name_leads_elsewhere_is_refused(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v21")
    info = json.loads((root / "meta" / "info.json").read_text())
    [camera] = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    features = {name if name != camera else "../../../outside": feature for name, feature in info["features"].items()}
    edit_info(root, features=features)
    source = open_source(root)
    with pytest.raises(DatasetError, match=r"meta/info.json: video_path is .*within the dataset"):
        source.check(0)
    with pytest.raises(ValueError, match=r"the name of a camera of .* is '../../../outside', expected plain names"):
        build_frame_cache(source, root.parent / "cache", height=8, width=8)
    assert not (root.parent / "cache").exists()


def test_links_that_users_make_keep_working(datasets: Path, tmp_path: Path) -> None:
    """A directory that is a link, and files that are links, as in the cache of the hub."""
    linked = tmp_path / "linked"
    shutil.copytree(datasets / "aloha_v30", linked, copy_function=os.symlink)
    (tmp_path / "dataset").symlink_to(linked, target_is_directory=True)
    source = open_source(tmp_path / "dataset")
    assert source.check(3) == 151
    assert source.read_frames(3, source.cameras[0], np.array([5])).any()


@pytest.mark.parametrize("repo_id", ["../libero_v21", "someone/.."])
def test_a_hub_id_cannot_lead_out_of_the_directory_of_datasets(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_id: str
) -> None:
    home = tmp_path / "home" / "lerobot"
    (home / "someone").mkdir(parents=True)
    shutil.copytree(datasets / "libero_v21", tmp_path / "home" / "libero_v21")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HF_LEROBOT_HOME", str(home))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DatasetError, match="no such directory, and not a hub id"):
        open_source(repo_id)


def test_a_serial_number_is_no_path(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("droid_like")
    path = sorted(root.rglob("metadata_*.json"))[1]
    replace(path, json.dumps(json.loads(path.read_text()) | {"wrist_cam_serial": "../../../../video"}).encode())
    with pytest.raises(EpisodeError, match=r"wrist_cam_serial is '../../../../video', expected the serial number"):
        open_source(root).check(1)


def external_link(file: h5py.File, other: str) -> None:
    file["action"] = h5py.ExternalLink(other, "/action")


def external_storage(file: h5py.File, other: str) -> None:
    file.create_dataset("action", (60, 14), np.float32, external=[(other, 0, h5py.h5f.UNLIMITED)])


def virtual_dataset(file: h5py.File, other: str) -> None:
    layout = h5py.VirtualLayout((60, 14), np.float32)
    layout[:] = h5py.VirtualSource(other, "action", shape=(60, 14))
    file.create_virtual_dataset("action", layout)


MAKERS = [external_link, external_storage, virtual_dataset]


def with_action_elsewhere(root: Path, make: Callable[[h5py.File, str], None], other: Path, name: str) -> np.ndarray:
    """Moves the actions of episode 0 to the file `other`, which is called `name` there; returns the actions."""
    path = root / "episode_0.hdf5"
    action = open_source(root).episode(0).columns["action"]
    if make is external_storage:
        other.write_bytes(action.tobytes())
    else:
        with h5py.File(other, "w") as file:
            file["action"] = action
    replace(path, path.read_bytes())
    with h5py.File(path, "r+") as file:
        del file["action"]
        make(file, name)
    return action


@pytest.mark.parametrize("make", MAKERS)
def test_hdf5_data_outside_of_the_dataset_is_refused(
    copy_dataset: Callable[[str], Path], make: Callable[[h5py.File, str], None]
) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    with_action_elsewhere(root, make, root.parent / "secret", str(root.parent / "secret"))
    with pytest.raises(EpisodeError, match=r"episode_0.hdf5: episode 0: action leads to '.*/secret', a file o"):
        open_source(root).episode(0)


@pytest.mark.parametrize("make", [external_link, virtual_dataset])
def test_hdf5_data_in_a_file_beside_are_read(
    copy_dataset: Callable[[str], Path], make: Callable[[h5py.File, str], None]
) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    action = with_action_elsewhere(root, make, root / "part", "part")
    np.testing.assert_array_equal(open_source(root).episode(0).columns["action"], action)


def test_the_manifest_of_a_cache_names_files_in_the_cache(datasets: Path, tmp_path: Path) -> None:
    source = open_source(datasets / "libero_v30")
    build_frame_cache(source, tmp_path / "cache", height=8, width=8, cameras=("image",))
    shutil.copytree(tmp_path / "cache" / "image", tmp_path / "outside")
    manifest = read_json_with_checksum(tmp_path / "cache" / MANIFEST)
    manifest["shards"][0]["file"] = "../outside/00000.frames"
    write_json_with_checksum(tmp_path / "cache" / MANIFEST, manifest)
    with pytest.raises(
        ValueError, match=r"a file of .*manifest.json is '../outside/00000.frames', expected plain names"
    ):
        FrameCache(tmp_path / "cache", source, ("image",), 8, 8)


def test_names_of_cameras_that_we_write(tmp_path: Path) -> None:
    features = {"../../camera": Feature("video", (16, 16, 3))}
    with pytest.raises(ValueError, match=r"the file of camera '../../camera' is .*, expected plain names"):
        Replay(tmp_path / "replay", features, fps=10)
    with pytest.raises(ValueError, match=r"'\.\.': LeRobot allows no '/'"):
        LeRobotWriter(tmp_path / "dataset", fps=10, features={"..": Feature("video", (16, 16, 3))})
    assert not list(tmp_path.iterdir())
