"""One small warm policy for all server tests."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled() -> Iterator[None]:
    """Most of the time here would go into optimising programs that run a few times."""
    from serving_helpers import quick_compiles

    with quick_compiles():
        yield


@pytest.fixture(scope="session")
def policy() -> Any:
    from serving_helpers import quick_compiles, state_policy

    with quick_compiles():
        return state_policy()
