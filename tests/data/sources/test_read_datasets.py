"""Every test dataset, every frame and every number, against what was written into it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import frame_codes
import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest

from acrlpd.data.sources.source import DatasetError, EpisodeSource, open_source

# name -> (base and spread of lengths, state column, state dim, action column, action dim)
TRUTH = {
    "aloha_v21": ((100, 60), "observation.state", 14, "action", 14),
    "aloha_v30": ((100, 60), "observation.state", 14, "action", 14),
    "libero_v21": ((40, 30), "state", 8, "actions", 7),
    "libero_v30": ((40, 30), "state", 8, "actions", 7),
    "aloha_hdf5_compressed": ((60, 40), "observation.state", 14, "action", 14),
    "aloha_hdf5_sim_raw": ((60, 40), "observation.state", 14, "action", 14),
    "droid_like": ((60, 40), "joint_position", 7, "action/joint_velocity", 7),
}
# DROID names cameras by role; their files, and so their numbers, are in another order.
CAMERA_NUMBER = {"exterior_image_1_left": 1, "exterior_image_2_left": 2, "wrist_image_left": 0}


@pytest.fixture(scope="module", params=sorted(TRUTH))
def opened(request: pytest.FixtureRequest, datasets: Path) -> tuple[str, EpisodeSource]:
    return request.param, open_source(datasets / request.param)


def camera_number(source: EpisodeSource, camera: str) -> int:
    return CAMERA_NUMBER.get(camera, source.cameras.index(camera))


def test_every_frame_is_the_one_asked_for(opened: tuple[str, EpisodeSource]) -> None:
    _, source = opened
    for i in range(len(source)):
        episode = source.episode(i)
        for camera in source.cameras:
            found = frame_codes.decode_all(episode.frames(camera, np.arange(episode.length)))
            number = camera_number(source, camera)
            assert found == [(episode.index, t, number) for t in range(episode.length)]


def test_frames_in_any_order_and_repeated(opened: tuple[str, EpisodeSource]) -> None:
    _, source = opened
    episode, camera = source.episode(1), source.cameras[-1]
    ts = np.random.default_rng(0).integers(0, episode.length, 25)
    frames = episode.frames(camera, ts)
    assert [code[1] for code in frame_codes.decode_all(frames)] == ts.tolist()
    assert frames.shape == (25, *source.features[camera].shape)
    np.testing.assert_array_equal(episode.frame(camera, int(ts[7])), frames[7])
    assert len(episode.frames(camera, [])) == 0


def test_columns_are_what_was_recorded(opened: tuple[str, EpisodeSource]) -> None:
    name, source = opened
    (base, spread), state, state_dim, action, action_dim = TRUTH[name]
    for i in range(len(source)):
        episode = source.episode(i)
        assert episode.length == source.lengths[i] == frame_codes.length(episode.index, base, spread)
        length = episode.length
        np.testing.assert_allclose(
            episode.columns[state], frame_codes.state(episode.index, length, state_dim), atol=1e-6
        )
        np.testing.assert_allclose(
            episode.columns[action], frame_codes.state(episode.index, length, action_dim, ahead=1), atol=1e-6
        )


def test_all_columns_at_once_are_those_of_the_episodes(opened: tuple[str, EpisodeSource]) -> None:
    name, source = opened
    table = source.read_columns()
    assert table.offsets.tolist() == [0, *np.cumsum(source.lengths)]
    for i in range(len(source)):
        episode = source.episode(i)
        rows = table.rows(i)
        assert set(episode.columns) == set(table.columns)
        for column, values in episode.columns.items():
            np.testing.assert_array_equal(table.columns[column][rows], values)
        assert {table.prompts[p] for p in table.prompt_index[rows]} == {episode.prompt}
    action = TRUTH[name][3]
    named = source.read_columns([action])
    assert list(named.columns) == [action]
    np.testing.assert_array_equal(named.columns[action], table.columns[action])


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("aloha_v30", ("Transfer cube", "Insert peg into socket")),
        ("libero_v21", ("put the bowl on the plate", "open the drawer")),
        ("droid_like", ("Move object into or out of container",)),
        ("aloha_hdf5_sim_raw", (None,)),
    ],
)
def test_prompts_come_from_the_tasks(datasets: Path, name: str, prompts: tuple[str | None, ...]) -> None:
    assert open_source(datasets / name).read_columns([]).prompts == prompts


@pytest.mark.parametrize("name", ["aloha_v21", "aloha_v30"])
def test_rewards_and_successes_are_read(datasets: Path, name: str) -> None:
    for episode in open_source(datasets / name):
        success = np.zeros(episode.length, bool)
        success[-1] = frame_codes.success(episode.index)
        np.testing.assert_array_equal(episode.columns["next.success"], success)
        np.testing.assert_array_equal(episode.columns["next.reward"], success.astype(np.float32))
        assert episode.columns["next.done"].tolist() == [False] * (episode.length - 1) + [True]


@pytest.mark.parametrize("kind", ["aloha", "libero"])
def test_both_lerobot_versions_of_the_same_content_are_equal(datasets: Path, kind: str) -> None:
    old, new = open_source(datasets / f"{kind}_v21"), open_source(datasets / f"{kind}_v30")
    assert (len(old), old.fps, old.cameras, old.features) == (len(new), new.fps, new.cameras, new.features)
    for a, b in zip(old, new, strict=True):
        assert (a.index, a.length, a.prompt) == (b.index, b.length, b.prompt)
        for name in a.columns:
            np.testing.assert_array_equal(a.columns[name], b.columns[name])
        for camera in old.cameras:
            ts = np.arange(0, a.length, 9)
            x, y = a.frames(camera, ts), b.frames(camera, ts)
            if old.features[camera].dtype == "image":
                np.testing.assert_array_equal(x, y)
            else:  # the two were encoded one by one, with losses
                assert frame_codes.decode_all(x) == frame_codes.decode_all(y)
                assert np.abs(x.astype(int) - y).mean() < 4


def test_droid_actions_are_openpis(datasets: Path) -> None:
    columns = open_source(datasets / "droid_like").episode(0).columns
    np.testing.assert_array_equal(columns["actions"][:, :7], columns["action/joint_velocity"].astype(np.float32))
    np.testing.assert_array_equal(columns["actions"][:, 7], columns["action/gripper_position"].astype(np.float32))
    assert columns["next.success"][-1] and not columns["next.success"][:-1].any()


def test_droid_language_annotations_win_over_the_category(copy_dataset, tmp_path: Path) -> None:
    root = copy_dataset("droid_like")
    (root / "aggregated-annotations-1.json").write_text(
        '{"PROBE+x+0": {"language_instruction1": "put the marker in the mug"}}'
    )
    source = open_source(root)
    assert source.episode(0).prompt == "put the marker in the mug"
    assert source.episode(1).prompt == "Move object into or out of container"


@pytest.mark.parametrize("content", ['{"PROBE+x+0": {"lang', "[]"])
def test_damaged_droid_annotations_are_named(copy_dataset, content: str) -> None:
    root = copy_dataset("droid_like")
    (root / "aggregated-annotations-1.json").write_text(content)
    with pytest.raises(DatasetError, match=r"aggregated-annotations-1\.json: not a JSON object, truncated or damaged"):
        open_source(root).episode(0)


def test_aloha_files_may_carry_rewards_a_success_a_task_and_a_rate(copy_dataset) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    for number, path in enumerate(sorted(root.iterdir())):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        with h5py.File(path, "r+") as file:
            file["reward"] = np.linspace(0, 1, len(file["action"]))[:, None]
            file.attrs.update(success=number == 1, task="sort the screws", fps=30)
    source = open_source(root)
    assert (source.fps, source.features["next.reward"].shape) == (30, ())
    for number, episode in enumerate(source):
        assert episode.prompt == "sort the screws"
        assert episode.columns["next.reward"][-1] == 1
        assert episode.columns["next.success"].sum() == episode.columns["next.success"][-1] == number


def test_a_row_group_of_many_episodes_is_read_once(
    copy_dataset, datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, original = copy_dataset("aloha_v30"), open_source(datasets / "aloha_v30")
    path = root / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    path.unlink()  # it is a hard link to the original
    pq.write_table(table, path)
    assert pq.read_metadata(path).num_row_groups == 1
    reads, read = [], pq.ParquetFile.read_row_groups
    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", lambda *args, **kw: reads.append(1) or read(*args, **kw))
    episodes = list(open_source(root))
    assert len(reads) == 1
    for found, expected in zip(episodes, original, strict=True):
        for name, values in expected.columns.items():
            np.testing.assert_array_equal(found.columns[name], values)


def test_opening_reads_metadata_only(copy_dataset) -> None:
    for name in ("aloha_v21", "aloha_v30"):
        root = copy_dataset(name)
        shutil.rmtree(root / "data")
        shutil.rmtree(root / "videos")
        source = open_source(root)
        assert source.lengths.sum() == 1542
        with pytest.raises(DatasetError, match=r"missing"):
            source.episode(0)


def test_identity_follows_content_not_place(copy_dataset, datasets: Path, tmp_path: Path) -> None:
    for name in TRUTH:
        original, copy = open_source(datasets / name), copy_dataset(name)
        assert open_source(copy).identity == original.identity
    assert len({open_source(datasets / name).identity for name in TRUTH}) == len(TRUTH)
    changed = tmp_path / "aloha_v30" / "videos" / "observation.images.cam_high" / "chunk-000" / "file-001.mp4"
    changed.unlink()
    changed.write_bytes(b"another")
    assert open_source(tmp_path / "aloha_v30").identity != open_source(datasets / "aloha_v30").identity


def test_an_unknown_camera_or_column_is_named_with_what_there_is(datasets: Path) -> None:
    source = open_source(datasets / "libero_v30")
    with pytest.raises(DatasetError, match=r"'top'.*wrist_image"):
        source.episode(0).frame("top", 0)
    with pytest.raises(DatasetError, match=r"'action'.*actions"):
        source.read_columns(["action"])
    with pytest.raises(IndexError, match=r"steps 0..39"):
        source.episode(0).frame("image", 40)


def test_closing_a_source_leaves_it_usable(datasets: Path) -> None:
    source = open_source(datasets / "aloha_v30")
    before = source.episode(3).frame(source.cameras[0], 5)
    source.close()
    np.testing.assert_array_equal(source.episode(3).frame(source.cameras[0], 5), before)


def test_an_aloha_prompt_in_bytes_of_a_fixed_length(copy_dataset: Callable[[str], Path]) -> None:
    path = copy_dataset("aloha_hdf5_sim_raw") / "episode_1.hdf5"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with h5py.File(path, "r+") as file:
        file.attrs["task"] = np.bytes_("fold the towel")
    assert open_source(path.parent).episode(1).prompt == "fold the towel"


def test_identity_depends_on_files_alone(copy_dataset: Callable[[str], Path]) -> None:
    """What a file system says about the size of a directory differs from one to the next."""
    root = copy_dataset("aloha_v30")
    before = open_source(root).identity
    (root / "videos" / "another.camera").mkdir()
    assert open_source(root).identity == before
    (root / "videos" / "another.camera" / "file.mp4").write_bytes(b"")
    assert open_source(root).identity != before
