import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "envs"))  # the toy environment
sys.path.append(str(pathlib.Path(__file__).parents[1] / "serving"))  # small checkpoints

from training_helpers import Processes


@pytest.fixture(scope="session")
def processes() -> Processes:
    return Processes()
