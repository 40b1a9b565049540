"""Where datasets are found, and what is said when they are not."""

import builtins
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from acrlpd.data.sources.source import DatasetError, open_source


def test_a_directory_without_a_dataset_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"meta/info.json .*hdf5 .*trajectory.h5"):
        open_source(tmp_path)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no such directory"):
        open_source(tmp_path / "nothing" / "here")


def test_a_file_is_not_a_dataset(datasets: Path) -> None:
    with pytest.raises(DatasetError, match=r"give the dataset's directory"):
        open_source(datasets / "aloha_hdf5_sim_raw" / "episode_0.hdf5")


def test_an_unsupported_version_is_refused(copy_dataset) -> None:
    root = copy_dataset("libero_v21")
    info = json.loads((root / "meta" / "info.json").read_text())
    (root / "meta" / "info.json").unlink()
    (root / "meta" / "info.json").write_text(json.dumps(info | {"codebase_version": "v1.6"}))
    with pytest.raises(DatasetError, match=r"v1\.6 cannot be read, only v2\.0, v2\.1 and v3\.0"):
        open_source(root)


def test_version_2_0_is_read_like_2_1(copy_dataset) -> None:
    root = copy_dataset("libero_v21")
    info = json.loads((root / "meta" / "info.json").read_text())
    (root / "meta" / "info.json").unlink()
    (root / "meta" / "info.json").write_text(json.dumps(info | {"codebase_version": "v2.0"}))
    (root / "meta" / "episodes_stats.jsonl").unlink()
    (root / "images").mkdir()
    source = open_source(root)
    assert (source.format, len(source), source.episode(2).length) == ("LeRobot v2.0", 6, 54)


def test_metadata_of_several_writers_is_one_dataset(copy_dataset, datasets: Path) -> None:
    root = copy_dataset("aloha_v30")
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    path.unlink()  # it is a hard link to the original
    pq.write_table(table.slice(0, 5), path)
    rest = table.slice(5)
    for name, kind in {"length": pa.int32(), "tasks": pa.list_(pa.field("item", pa.large_string()))}.items():
        rest = rest.set_column(rest.column_names.index(name), name, rest[name].cast(kind))
    pq.write_table(rest, path.with_name("file-001.parquet"))
    source, original = open_source(root), open_source(datasets / "aloha_v30")
    assert source.lengths.tolist() == original.lengths.tolist()
    assert [source.episode_tasks(i) for i in (0, 11)] == [original.episode_tasks(i) for i in (0, 11)]
    assert source.episode(11).prompt == original.episode(11).prompt


def test_a_hub_id_is_found_in_lerobots_own_directory(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    shutil.copytree(datasets / "libero_v30", tmp_path / "someone" / "libero", copy_function=os.link)
    assert len(open_source("someone/libero")) == 6


def test_a_hub_id_without_the_hub_client_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_LEROBOT_HOME", raising=False)
    real_import = builtins.__import__

    def without_hub(name: str, *args: object, **kwargs: object) -> object:
        if name == "huggingface_hub":
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(DatasetError, match=r"pip install .*\[hub\]'"):
        open_source("someone/not-here")


def test_aloha_episodes_keep_their_numbers(copy_dataset) -> None:
    root = copy_dataset("aloha_hdf5_sim_raw")
    (root / "episode_0.hdf5").rename(root / "episode_10.hdf5")
    assert open_source(root).indices == (1, 10)
