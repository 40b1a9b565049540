"""One small warm policy for all server tests."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "envs"))  # the toy environment's configs


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled() -> Iterator[None]:
    """Most of the time here would go into optimising programs that run a few times."""
    from small_checkpoints import quick_compiles

    with quick_compiles():
        yield


@pytest.fixture(scope="session")
def policy() -> Any:
    from serving_helpers import state_policy
    from small_checkpoints import quick_compiles

    with quick_compiles():
        return state_policy()
