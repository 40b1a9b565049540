import os
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "envs"))  # the toy environment
sys.path.append(str(pathlib.Path(__file__).parents[1] / "serving"))  # small checkpoints

from training_helpers import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers compile for each other
        base = base.parent
    cache = base / "xla_cache"
    cache.mkdir(exist_ok=True)
    return Processes(cache)
