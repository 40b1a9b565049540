import tarfile
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def goldens() -> Path:
    return DATA / "goldens"


def extract(folder: Path, name: str) -> Path:
    with tarfile.open(DATA / "datasets" / f"{name}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(scope="session")
def libero(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same six episodes in LeRobot v2.1 and v3.0; every frame says in its pixels which one it is."""
    folder = tmp_path_factory.mktemp("libero")
    return {version: extract(folder, f"libero_{version}") for version in ("v21", "v30")}


@pytest.fixture(scope="session")
def aloha(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve episodes in LeRobot v2.1 and v3.0, with video and rewards."""
    folder = tmp_path_factory.mktemp("aloha")
    return {version: extract(folder, f"aloha_{version}") for version in ("v21", "v30")}


@pytest.fixture(scope="session")
def droid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(tmp_path_factory.mktemp("droid"), "droid_like")
