import pathlib

import pytest
from training_helpers import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    return Processes(tmp_path_factory.mktemp("xla_cache"))


@pytest.fixture
def checkpoint_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoints"
