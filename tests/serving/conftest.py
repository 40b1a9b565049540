"""One small warm policy for all server tests."""

from collections.abc import Iterator

import jax
import pytest

pytest.importorskip("msgpack", reason="the server needs msgpack and websockets: pip install 'acrlpd[serve]'")
pytest.importorskip("websockets", reason="the server needs msgpack and websockets: pip install 'acrlpd[serve]'")

from serving_helpers import state_policy

from acrlpd.serving.serving_policy import ServingPolicy


@pytest.fixture(scope="package", autouse=True)
def compile_quickly() -> Iterator[None]:
    """Most of the time here would go into optimising programs that run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def policy() -> ServingPolicy:
    return state_policy()
