"""Datasets go to a hub with a card, and come back as they were."""

import tarfile
from pathlib import Path

import pytest
import yaml

from acrlpd.cli.pull import main as pull_main
from acrlpd.cli.push import main as push_main
from acrlpd.data.pipeline.labels import Label, Labels, labels_path, load_labels
from acrlpd.data.sources.source import open_source
from acrlpd.hub import HubError
from local_hub import LocalHub

ARCHIVE = Path(__file__).parents[1] / "datasets" / "libero_v30.tar.gz"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "here", filter="data")
    [info] = (tmp_path / "here").rglob("info.json")
    root = info.parents[1]
    (root / ".env").write_text("HF_TOKEN=secret")
    (root / "notes.txt").write_text("not part of a dataset")
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_dataset_goes_to_the_hub_and_comes_back(dataset: Path, hub: LocalHub, tmp_path: Path) -> None:
    source = open_source(dataset)
    labels = Labels(labels_path(dataset), {0: Label(success=True, length=int(source.lengths[0]))})
    labels.save()
    assert push_main([str(dataset), "lab/libero", "--tag", "first"]) == 0
    repository = hub.repositories["datasets", "lab/libero"]
    assert set(repository.tags) == {"first", "v3.0"}  # lerobot looks for the version of the layout
    card = repository.files(repository.head)["README.md"].decode()
    _, header, text = card.split("---\n", 2)
    assert "LeRobot" in yaml.safe_load(header)["tags"]
    assert "| episodes | 6 |" in text and "acrlpd pull hf://datasets/lab/libero@first" in text
    assert pull_main(["datasets/lab/libero@first", "--output", str(tmp_path / "copy")]) == 0
    pulled = contents(tmp_path / "copy")
    for name in ("README.md", "hub.json"):
        pulled.pop(name)
    kept = contents(dataset)
    for name in (".env", "notes.txt"):
        kept.pop(name)
    assert pulled == kept
    copy = open_source(tmp_path / "copy")
    found = load_labels(labels_path(tmp_path / "copy"), copy)
    assert len(copy) == 6 and found is not None and found.episodes == labels.episodes


def test_a_changed_file_is_noticed(dataset: Path, hub: LocalHub, tmp_path: Path) -> None:
    push_main([str(dataset), "lab/libero"])
    repository = hub.repositories["datasets", "lab/libero"]
    files = repository.files(repository.head)
    name = next(name for name in files if name.endswith(".parquet"))
    repository.commit(files | {name: files[name][:-1] + b"x"})
    with pytest.raises(HubError, match=r"damaged and was not kept: .*parquet has changed"):
        pull_main(["datasets/lab/libero", "--output", str(tmp_path / "copy")])
