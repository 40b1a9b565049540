import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

ARCHIVES = Path(__file__).parents[1] / "data" / "datasets"


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all test datasets, unpacked. Not to be written to: see `copy_dataset`."""
    folder = tmp_path_factory.mktemp("datasets")
    for archive in ARCHIVES.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def copy_dataset(datasets: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a dataset as hard links: replace files in the copy, never write into them."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(datasets / name, target, copy_function=os.link)
        return target

    return copy
