"""Broken copies of the test datasets: the error names the file, the episode and, where there is one, the frame."""

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from broken_copies import assert_bad, replace, replace_video

from acrlpd.data.sources.source import DatasetError, EpisodeError, open_source
from acrlpd.data.tools.inspect import Frames, inspect_source, validate_source

ARCHIVES = Path(__file__).parents[2] / "datasets"
CAMERA = "observation.images.cam_high"
# Statistics that lerobot keeps for itself; nothing is read from them.
UNUSED = ("episodes_stats.jsonl", "stats.json")


def all_files() -> list[tuple[str, str]]:
    """(dataset, file) of every file of every test dataset."""
    found = []
    for archive in sorted(ARCHIVES.glob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            found += [tuple(member.name.split("/", 1)) for member in tar.getmembers() if member.isfile()]
    return found


def problems_of(root: Path, frames: Frames = "ends") -> list[str]:
    """Everything that is said about a dataset when it is opened, read and (partly) decoded."""
    try:
        return validate_source(open_source(root), frames=frames)
    except DatasetError as error:
        return [str(error)]


def truncate(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def overwrite(data: bytes) -> bytes:
    """Noise over the middle: opens like the real thing, but for what is in there."""
    size = max(64, len(data) // 20)
    noise = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    return data[: len(data) // 2] + noise + data[len(data) // 2 + size :]


@pytest.mark.parametrize(("name", "file"), all_files())
def test_a_truncated_file_is_named(copy_dataset: Callable[[str], Path], name: str, file: str) -> None:
    root = copy_dataset(name)
    replace(root / file, truncate((root / file).read_bytes()))
    problems = problems_of(root)
    if Path(file).name in UNUSED:
        assert not problems
        return
    assert problems
    assert all(file in problem for problem in problems)


@pytest.mark.parametrize(("name", "file"), all_files())
def test_a_missing_file_is_named(copy_dataset: Callable[[str], Path], name: str, file: str) -> None:
    root = copy_dataset(name)
    (root / file).unlink()
    problems = problems_of(root)
    if Path(file).name in UNUSED or file.endswith(".hdf5"):  # an ALOHA episode that is gone is just not there
        assert not problems
        return
    assert problems
    # A folder where several files may be is named itself.
    names = (file, str(Path(file).parent), "meta/episodes")
    assert all(any(name in problem for name in names) for problem in problems)


OVERWRITTEN = [
    ("aloha_v21", "data/chunk-000/episode_000003.parquet", r"episode 3: not a readable parquet"),
    ("aloha_v21", "meta/episodes.jsonl", r"episodes.jsonl, line \d+: truncated or damaged"),
    ("aloha_v21", "meta/info.json", "not valid JSON"),
    ("aloha_v21", f"videos/chunk-000/{CAMERA}/episode_000003.mp4", r"episode 3, frame \d+, camera '.*': the video"),
    ("aloha_v30", "data/chunk-000/file-000.parquet", r"episode 7: not a readable parquet"),
    ("aloha_v30", f"videos/{CAMERA}/chunk-000/file-001.mp4", r"episode 9, frame \d+, camera '.*': the video"),
    ("libero_v30", "meta/tasks.parquet", "not a readable parquet"),
    ("aloha_hdf5_compressed", "episode_1.hdf5", r"episode 1, frame \d+, camera '.*': not a readable JPEG"),
    (
        "droid_like",
        "success/2023-07-07/Fri_Jul__7_09_41_23_2023/recordings/MP4/12345678.mp4",
        r"episode 1, frame \d+, camera 'wrist_image_left': the video",
    ),
]


@pytest.mark.parametrize(("name", "file", "message"), OVERWRITTEN)
def test_noise_in_a_file_is_found_where_it_is(
    copy_dataset: Callable[[str], Path], name: str, file: str, message: str
) -> None:
    root = copy_dataset(name)
    replace(root / file, overwrite((root / file).read_bytes()))
    problems = problems_of(root, frames="all")
    assert problems
    assert file in problems[0]
    assert re.search(message, problems[0]), problems[0]


def edit_parquet(path: Path, edit: Callable[[dict[str, list]], None]) -> None:
    table = pq.read_table(path)
    columns = table.to_pydict()
    edit(columns)
    replace_table(path, pa.Table.from_pydict(columns, schema=table.schema.remove_metadata()))


def replace_table(path: Path, table: pa.Table) -> None:
    path.unlink()  # it is a hard link to the original
    pq.write_table(table, path)


def set_value(column: str, row: int, value: object) -> Callable[[dict[str, list]], None]:
    def edit(columns: dict[str, list]) -> None:
        columns[column][row] = value

    return edit


BAD_VALUES = [
    ("action", 237 + 5, [float("nan")] * 14, "column 'action' is not finite"),
    ("action", 237 + 5, [0.0] * 13 + [float("inf")], "column 'action' is not finite"),
    ("observation.state", 237 + 5, [float("-inf")] + [0.0] * 13, "column 'observation.state' is not finite"),
    ("frame_index", 237 + 5, 6, "frame_index is 6, expected 5"),
    ("episode_index", 237 + 5, 3, "episode_index is 3, expected 2"),
    ("timestamp", 237 + 5, 0.111, "timestamp is 0.111, expected 0.1"),
    ("task_index", 237 + 5, 9, "task_index 9 is not among the 2 tasks"),
]


@pytest.mark.parametrize(("column", "row", "value", "message"), BAD_VALUES)
def test_a_bad_value_names_file_episode_and_frame(
    copy_dataset: Callable[[str], Path], column: str, row: int, value: object, message: str
) -> None:
    root = copy_dataset("aloha_v30")
    path = root / "data" / "chunk-000" / "file-000.parquet"
    edit_parquet(path, set_value(column, row, value))
    source = open_source(root)
    with pytest.raises(EpisodeError, match=r"episode 2, frame 5") as caught:
        source.episode(2)
    assert (caught.value.path, caught.value.episode, caught.value.frame) == (path, 2, 5)
    assert message in str(caught.value)
    with pytest.raises(EpisodeError, match=r"episode 2, frame 5"):
        source.read_columns()
    assert source.episode(3).length == 151
    skipping = open_source(root, on_bad_episode="skip")
    assert skipping.indices == (0, 1, *range(3, 12))
    assert [(episode.index, message in episode.reason) for episode in skipping.skipped] == [(2, True)]
    assert np.isfinite(skipping.read_columns().columns["action"]).all()
    assert skipping.episode(2).index == 3


def test_an_empty_value_is_refused(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v30")
    edit_parquet(root / "data" / "chunk-000" / "file-000.parquet", set_value("action", 237 + 5, None))
    with pytest.raises(EpisodeError, match=r"episode 2: column 'action' has empty \(null\) values"):
        open_source(root).read_columns(["action"])
    assert open_source(root, on_bad_episode="skip").read_columns(["action"]).offsets[-1] == 1542 - 114


def test_lists_of_different_lengths_are_refused_even_if_their_sum_is_right(copy_dataset: Callable[[str], Path]) -> None:
    """Not every writer declares how long the lists of a column are."""
    root = copy_dataset("aloha_v21")
    path = root / "data" / "chunk-000" / "episode_000002.parquet"
    table = pq.read_table(path)
    actions = table["action"].to_pylist()
    actions[6] += [actions[5].pop()]
    place = table.column_names.index("action")
    replace_table(path, table.set_column(place, "action", pa.array(actions, pa.list_(pa.float32()))))
    assert_bad(root, 2, r"episode 2: column 'action' has lists of \[13, 14, 15\] numbers, expected equal lengths")


def test_metadata_that_promises_more_steps_than_there_are(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v21")
    path = root / "meta" / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["length"] += 1
    replace(path, "\n".join(map(json.dumps, lines)).encode())
    with pytest.raises(EpisodeError, match=r"episode_000004.parquet: episode 4: .* 129 steps .* 128 rows"):
        open_source(root).episode(4)


@pytest.mark.parametrize("name", ["aloha_v21", "aloha_v30"])
def test_a_count_of_episodes_that_disagrees(copy_dataset: Callable[[str], Path], name: str) -> None:
    root = copy_dataset(name)
    info = json.loads((root / "meta" / "info.json").read_text())
    replace(root / "meta" / "info.json", json.dumps(info | {"total_episodes": 13}).encode())
    with pytest.raises(DatasetError, match=r"meta/episodes.*lists 12 episodes, meta/info.json says 13"):
        open_source(root)


def test_a_column_that_is_declared_but_not_there(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v21")
    path = root / "data" / "chunk-000" / "episode_000002.parquet"
    table = pq.read_table(path).drop_columns(["action"])
    path.unlink()
    pq.write_table(table, path)
    with pytest.raises(EpisodeError, match=r"000002.parquet: episode 2: column 'action' .* not in the file"):
        open_source(root).episode(2)


def test_a_clip_that_lies_past_the_end_of_its_video(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v30")
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    edit_parquet(path, set_value(f"videos/{CAMERA}/from_timestamp", 11, 100.0))
    source = open_source(root)
    with pytest.raises(EpisodeError, match=r"file-001.mp4: episode 11, frame 3, camera .*: the video ends before"):
        source.episode(11).frame(CAMERA, 3)
    assert [e.index for e in open_source(root, on_bad_episode="skip").skipped] == [11]


def test_a_video_at_another_rate_is_refused_instead_of_guessed(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v21")
    path = root / "videos" / "chunk-000" / CAMERA / "episode_000001.mp4"
    replace_video(path, rate=30, frames=137, height=240, width=320)
    with pytest.raises(EpisodeError, match=r"episode 1, frame 1, camera .*: no frame at 0.0200 s: the nearest is"):
        open_source(root).episode(1).frames(CAMERA, [0, 1])


def test_a_frame_of_another_size(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v21")
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"][CAMERA]["shape"] = [480, 640, 3]
    replace(root / "meta" / "info.json", json.dumps(info).encode())
    with pytest.raises(EpisodeError, match=r"frames are \[240, 320, 3\], meta/info.json says \[480, 640, 3\]"):
        open_source(root).episode(0).frame(CAMERA, 0)


@pytest.mark.parametrize("name", ["aloha_v21", "aloha_v30"])
def test_values_that_do_not_have_their_statistics(copy_dataset: Callable[[str], Path], name: str) -> None:
    """A value that is finite but wrong: only the dataset's own statistics know."""
    root = copy_dataset(name)
    file, row = ("episode_000002.parquet", 5) if name == "aloha_v21" else ("file-000.parquet", 237 + 5)
    edit_parquet(root / "data" / "chunk-000" / file, lambda columns: columns["action"][row].__setitem__(13, 7.5))
    assert problems_of(root) == []
    [problem] = problems_of(root, frames="all")
    assert f"{file}: episode 2: column 'action' does not fit its statistics in meta/: the max of dim 13" in problem
    assert "is 7.5, recorded " in problem


def test_lerobot_without_steps(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v30")
    edit_parquet(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet", set_value("length", 11, 0))
    assert_bad(root, 11, "episode 11: it has no steps")
    with pytest.raises(EpisodeError, match=r"episode 11: it has no steps; .* on_bad_episode=skip"):
        inspect_source(open_source(root))


def edit_info(root: Path, edit: Callable[[dict], object]) -> None:
    info = json.loads((root / "meta" / "info.json").read_text())
    edit(info)
    replace(root / "meta" / "info.json", json.dumps(info).encode())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda info: info.update(fps=None), "fps is None, expected a number above 0"),
        (lambda info: info.update(fps=0), "fps is 0, expected a number above 0"),
        (lambda info: info.update(fps=float("nan")), "fps is nan, expected a number above 0"),
        (lambda info: info.update(chunks_size=0.5), "chunks_size is 0.5, expected a whole number above 0"),
        (lambda info: info.update(chunks_size=0), "chunks_size is 0, expected"),
        (lambda info: info.update(features=[]), "features is list, expected"),
        (lambda info: info["features"].update(action=3), "'action' has dtype None and shape None"),
        (lambda info: info["features"]["action"].pop("dtype"), "'action' has dtype None and shape"),
        (lambda info: info["features"]["action"].update(shape=None), "'action' has dtype 'float32' and shape None"),
        (lambda info: info["features"][CAMERA].update(shape=[240]), r"has shape \[240\], expected height, width"),
        (lambda info: info.update(video_path=None), "video_path is None, expected a path made of .*video_key"),
        (lambda info: info.update(data_path="{nope}.parquet"), "data_path is '{nope}.parquet', expected a path"),
    ],
)
@pytest.mark.parametrize("name", ["aloha_v21", "aloha_v30"])
def test_an_info_file_that_says_nonsense(
    copy_dataset: Callable[[str], Path], name: str, edit: Callable[[dict], object], message: str
) -> None:
    root = copy_dataset(name)
    edit_info(root, edit)
    with pytest.raises(DatasetError, match=rf"meta/info.json: .*{message}"):
        open_source(root).check(0)


def test_an_info_file_that_is_no_object(copy_dataset: Callable[[str], Path]) -> None:
    root = copy_dataset("aloha_v30")
    replace(root / "meta" / "info.json", b"[]")
    with pytest.raises(DatasetError, match=r"meta/info.json: expected an object with keys, found list"):
        open_source(root)
