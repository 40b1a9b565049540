"""Datasets by hub id, fetched with the real hub client from a hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from local_hub import LocalHub

pytest.importorskip("huggingface_hub", reason="huggingface-hub is missing: pip install 'acrlpd[hub]'")

REPO_ID = "someone/libero"


def inspect(settings: dict[str, str], repo_id: str) -> "subprocess.CompletedProcess[str]":
    """`acrlpd data inspect` as a user has it: the hub client reads its settings when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "acrlpd.cli.main", "data", "inspect", repo_id],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | settings,
    )


def test_a_dataset_is_fetched_once_and_then_found_without_the_hub(datasets: Path, tmp_path: Path) -> None:
    root = datasets / "libero_v30"
    with LocalHub() as hub:
        repository, settings = hub.add("datasets", REPO_ID, root), hub.environment(tmp_path)
        first = inspect(settings, REPO_ID)
        assert first.returncode == 0, first.stderr
        assert sorted(hub.downloaded) == sorted(str(f.relative_to(root)) for f in root.rglob("*") if f.is_file())
        again = inspect(settings, REPO_ID)
        assert again.returncode == 0 and len(hub.downloaded) == len(set(hub.downloaded))
    assert "6 episodes" in " ".join(first.stdout.split())
    snapshot = tmp_path / "hub" / "datasets--someone--libero" / "snapshots" / repository.head
    assert (snapshot / "meta" / "info.json").read_bytes() == (root / "meta" / "info.json").read_bytes()
    gone = inspect(settings, REPO_ID)
    assert gone.returncode == 0, gone.stderr
    assert gone.stdout == first.stdout


def test_a_dataset_that_the_hub_does_not_have(tmp_path: Path) -> None:
    with LocalHub() as hub:
        found = inspect(hub.environment(tmp_path), "someone/else")
    assert found.returncode == 2
    assert "someone/else: no such directory here or in" in found.stderr
    assert "the hub has no dataset someone/else" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}
    found = inspect(settings, REPO_ID)
    assert found.returncode == 2
    assert "the hub at http://127.0.0.1:9 cannot be reached for hf://datasets/someone/libero" in found.stderr
    assert "Traceback" not in found.stderr
