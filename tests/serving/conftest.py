"""One small warm policy for all server tests."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "envs"))  # the toy environment's configs


@pytest.fixture(scope="session")
def policy() -> Any:
    from serving_helpers import state_policy

    return state_policy()
