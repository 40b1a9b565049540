"""The unmodified openpi-client drives the server."""

import ssl
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import make_certificates
from serving_helpers import RunningServer, state_observation

from acrlpd.serving.secrets import create_tls_context
from acrlpd.serving.serving_policy import ServingPolicy

client_package = pytest.importorskip(
    "openpi_client.websocket_client_policy",
    reason="openpi-client is missing: pip install --no-deps openpi-client (it declares numpy < 2 but runs with 2)",
)


@pytest.fixture(scope="module")
def server(policy: ServingPolicy) -> Any:
    with RunningServer(policy) as running:
        yield running


def connect(server: RunningServer, **options: Any) -> Any:
    return client_package.WebsocketClientPolicy("127.0.0.1", server.server.port, **options)


def test_round_trip(server: RunningServer, policy: ServingPolicy) -> None:
    client = connect(server)
    assert client.get_server_metadata() == policy.metadata()
    for seed in range(3):
        message = state_observation(seed) | {"seed": seed}
        reply = client.infer(message)
        [expected] = policy.infer([policy.prepare(message)])
        assert isinstance(expected, dict)
        np.testing.assert_array_equal(reply["actions"], expected["actions"])
        assert reply["best_of_n"]["q_values"] == expected["best_of_n"]["q_values"]


def test_a_chunk_is_replayed_step_by_step(server: RunningServer) -> None:
    """The broker cuts every array of a reply into steps, also the fields that openpi's own server does not send."""
    broker_module = pytest.importorskip("openpi_client.action_chunk_broker", reason="dm-tree is missing")
    broker = broker_module.ActionChunkBroker(connect(server), action_horizon=4)
    message = state_observation(best_of_n=3, return_candidates=True) | {"seed": 2}
    whole = connect(server).infer(message)
    for step in range(4):
        result = broker.infer(message)
        np.testing.assert_array_equal(result["actions"], whole["actions"][step])
        assert len(result["candidates"]) == len(result["best_of_n"]["q_values"]) == 3
        np.testing.assert_array_equal(result["candidates"][1], whole["candidates"][1][step])


def test_errors_reach_their_client_which_can_reconnect(server: RunningServer) -> None:
    careless, careful = connect(server), connect(server)
    with pytest.raises(RuntimeError, match="state must be 3 numbers; found shape"):
        careless.infer({"state": np.zeros(4)})
    assert "actions" in careful.infer(state_observation())
    again = connect(server)
    assert "actions" in again.infer(state_observation())


def test_several_clients(server: RunningServer) -> None:
    replies: list[np.ndarray] = []

    def drive(seed: int) -> None:
        client = connect(server)
        replies.extend(client.infer(state_observation(seed))["actions"] for _ in range(5))

    threads = [threading.Thread(target=drive, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(replies) == 20 and all(actions.shape == (4, 2) for actions in replies)


def test_an_encrypted_connection(policy: ServingPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client trusts what OpenSSL trusts, so a laboratory's own authority is named in SSL_CERT_FILE."""
    files = make_certificates(tmp_path)
    with RunningServer(policy, tls=create_tls_context(files.cert, files.key), api_key="k") as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            client_package.WebsocketClientPolicy(server.url, api_key="k")
        monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
        client = client_package.WebsocketClientPolicy("wss://127.0.0.1", server.server.port, api_key="k")
        assert "actions" in client.infer(state_observation())


def test_the_api_key(policy: ServingPolicy) -> None:
    from websockets.exceptions import InvalidStatus

    with RunningServer(policy, api_key="k") as server:
        with pytest.raises(InvalidStatus):
            connect(server, api_key="other")
        assert "actions" in connect(server, api_key="k").infer(state_observation())
