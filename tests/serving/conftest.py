"""One small warm policy for all server tests."""

import pytest

pytest.importorskip("msgpack", reason="the server needs msgpack and websockets: pip install 'acrlpd[serve]'")
pytest.importorskip("websockets", reason="the server needs msgpack and websockets: pip install 'acrlpd[serve]'")

from serving_helpers import state_policy

from acrlpd.serving.serving_policy import ServingPolicy


@pytest.fixture(scope="session")
def policy() -> ServingPolicy:
    return state_policy()
