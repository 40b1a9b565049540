"""The server as clients see it: its protocol, its bounds, and how it handles clients that misbehave."""

import dataclasses
import socket
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest
from serving_helpers import RunningServer, ask, state_observation, wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from acrlpd.serving.message_format import packb, unpackb
from acrlpd.serving.serving_policy import ServingPolicy


@pytest.fixture(scope="module")
def server(policy: ServingPolicy) -> Any:
    with RunningServer(policy) as running:
        yield running


def test_metadata_comes_first_then_replies(server: RunningServer, policy: ServingPolicy) -> None:
    with connect(server.url, compression=None) as connection:
        metadata = unpackb(connection.recv())
        assert metadata == policy.metadata()
        assert metadata["best_of_n"] == 4 and metadata["num_steps"] == [2, 1] and metadata["observation"] == ["state"]
        first = ask(connection, state_observation(seed=1) | {"seed": 3})
        second = ask(connection, state_observation(seed=1) | {"seed": 3})
    [expected] = policy.infer([policy.prepare(state_observation(seed=1) | {"seed": 3})])
    assert isinstance(expected, dict)
    np.testing.assert_array_equal(first["actions"], expected["actions"])
    np.testing.assert_array_equal(second["actions"], expected["actions"])
    assert first["best_of_n"] == expected["best_of_n"]
    assert first["server_timing"]["infer_ms"] >= first["policy_timing"]["infer_ms"] > 0
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] >= first["server_timing"]["infer_ms"]


def test_health_and_metrics(server: RunningServer) -> None:
    assert server.get("/healthz") == (200, "OK\n")
    with server.connect() as connection:
        ask(connection, state_observation())
        values = server.scrape()
        _, text = server.get("/metrics")
    assert values['acrlpd_requests_total{result="ok"}'] >= 1
    assert values["acrlpd_request_seconds_count"] == values['acrlpd_requests_total{result="ok"}']
    assert values['acrlpd_request_seconds_bucket{le="+Inf"}'] == values["acrlpd_request_seconds_count"]
    assert values["acrlpd_batch_size_count"] == values["acrlpd_infer_seconds_count"] >= 1
    assert values["acrlpd_infer_seconds_sum"] > 0
    assert values["acrlpd_clients"] >= 1 and values["acrlpd_checkpoint_step"] == -1
    families = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    assert families == [
        ["acrlpd_requests_total", "counter"],
        ["acrlpd_refused_connections_total", "counter"],
        ["acrlpd_closed_connections_total", "counter"],
        ["acrlpd_reloads_total", "counter"],
        ["acrlpd_follow_restarts_total", "counter"],
        ["acrlpd_following", "gauge"],
        ["acrlpd_clients", "gauge"],
        ["acrlpd_waiting_requests", "gauge"],
        ["acrlpd_checkpoint_step", "gauge"],
        ["acrlpd_request_seconds", "histogram"],
        ["acrlpd_infer_seconds", "histogram"],
        ["acrlpd_batch_size", "histogram"],
    ]


def test_a_counter_says_0_before_it_counts(policy: ServingPolicy) -> None:
    with RunningServer(policy) as server:
        values = server.scrape()
    counters = [name for name in values if "_total{" in name]
    assert len(counters) == 13 and all(values[name] == 0 for name in counters)


def test_concurrent_clients_share_calls_and_keep_their_own_answers(
    server: RunningServer, policy: ServingPolicy
) -> None:
    results: dict[int, list[dict[str, Any]]] = {}
    ready = threading.Barrier(6)

    def client(number: int) -> None:
        with server.connect() as connection:
            ready.wait()
            messages = [state_observation(number, best_of_n=1 + number % 4) | {"seed": number}] * 8
            results[number] = [ask(connection, message) for message in messages]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert max(reply["server_timing"]["batch_size"] for replies in results.values() for reply in replies) > 1
    for number, replies in results.items():
        request = policy.prepare(state_observation(number, best_of_n=1 + number % 4) | {"seed": number})
        [expected] = policy.infer([request])
        assert isinstance(expected, dict)
        for reply in replies:
            np.testing.assert_allclose(reply["actions"], expected["actions"], atol=1e-5)
            assert reply["best_of_n"]["n"] == 1 + number % 4


def test_clients_with_other_steps_are_not_mixed(server: RunningServer, policy: ServingPolicy) -> None:
    def answers(num_steps: int, found: list[Any]) -> None:
        with server.connect() as connection:
            found += [ask(connection, state_observation(num_steps=num_steps) | {"seed": 1}) for _ in range(10)]

    one: list[Any] = []
    two: list[Any] = []
    threads = [threading.Thread(target=answers, args=args) for args in ((1, one), (2, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for num_steps, found in ((1, one), (2, two)):
        [expected] = policy.infer([policy.prepare(state_observation(num_steps=num_steps) | {"seed": 1})])
        assert isinstance(expected, dict) and len(found) == 10
        for reply in found:
            np.testing.assert_allclose(reply["actions"], expected["actions"], atol=1e-5)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xc1", "not valid msgpack"),
        ("hello", "found a text frame"),
        (packb({"state": np.zeros(9)}), "state must be 3 numbers"),
        (packb({"sate": np.zeros(3)}), "lacks 'state'; the observation has: sate"),
        (packb([1, 2]), "a request must be a dict"),
    ],
)
def test_errors_are_text_and_end_one_connection_only(server: RunningServer, message: Any, reason: str) -> None:
    with server.connect() as good, server.connect() as bad:
        answer = ask(bad, message)
        assert isinstance(answer, str) and reason in answer
        with pytest.raises(ConnectionClosed) as closed:
            bad.recv(timeout=120)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        assert "actions" in ask(good, state_observation())


def test_huge_messages_are_refused(policy: ServingPolicy) -> None:
    with RunningServer(policy, max_message_bytes=10_000) as server, server.connect() as good:
        with server.connect() as bad, pytest.raises(ConnectionClosed) as closed:
            bad.send(packb({"state": np.zeros(100_000)}))
            bad.recv(timeout=120)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert "actions" in ask(good, state_observation())


def test_an_api_key_is_asked_for(policy: ServingPolicy) -> None:
    with RunningServer(policy, api_key="secret") as server:
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": "secret"}):
            with pytest.raises(InvalidStatus) as refused:
                server.connect(additional_headers=headers)
            assert refused.value.response.status_code == 401
        assert server.get("/healthz")[0] == 200
        assert server.get("/metrics")[0] == 401
        key = {"Authorization": "Api-Key secret"}
        with server.connect(additional_headers=key) as connection:
            assert "actions" in ask(connection, state_observation())
        assert server.scrape(**key)['acrlpd_refused_connections_total{reason="unauthorized"}'] == 4


def test_the_number_of_clients_is_bounded(policy: ServingPolicy) -> None:
    with RunningServer(policy, max_clients=2) as server, server.connect() as first, server.connect():
        with pytest.raises(InvalidStatus) as refused:
            server.connect()
        assert refused.value.response.status_code == 503
        assert server.scrape()['acrlpd_refused_connections_total{reason="full"}'] == 1
        assert "actions" in ask(first, state_observation())


def test_clients_that_stall_or_vanish_do_not_disturb_the_others(server: RunningServer) -> None:
    address = ("127.0.0.1", server.server.port)
    silent = socket.create_connection(address)  # never says anything
    half = server.connect()
    half.socket.sendall(b"\x82\xfe\x10\x00abcd half a frame")  # 4096 bytes announced
    deaf = server.connect()
    for _ in range(20):  # asks without ever reading the answers
        deaf.send(packb(state_observation(return_candidates=True)))
    gone = server.connect()
    gone.send(packb(state_observation()))
    gone.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.socket.close()  # reset, not closed, with a request under way
    with server.connect() as good:
        for _ in range(20):
            assert "actions" in ask(good, state_observation())
    silent.close()
    half.socket.close()
    deaf.socket.close()


def slow(policy: ServingPolicy, seconds: float, begun: threading.Event | None = None) -> ServingPolicy:
    """The same policy with a transform that takes so many seconds, and says when it has begun."""

    def normalize(data: dict[str, Any]) -> dict[str, Any]:
        if begun is not None:
            begun.set()
        time.sleep(seconds)
        return policy.policy.normalize(data)

    return with_transforms(policy, normalize=normalize)


def with_transforms(policy: ServingPolicy, **transforms: Any) -> ServingPolicy:
    return dataclasses.replace(policy, policy=dataclasses.replace(policy.policy, **transforms))


def test_requests_time_out(policy: ServingPolicy) -> None:
    with RunningServer(slow(policy, 1.0), request_timeout_s=0.2) as server, server.connect() as connection:
        assert "no answer within 0.2 s" in ask(connection, state_observation())
        assert server.scrape()['acrlpd_requests_total{result="timeout"}'] == 1


def test_of_requests_at_once_as_many_as_the_number_pass(policy: ServingPolicy) -> None:
    with RunningServer(slow(policy, 0.2), max_concurrent_requests=2, max_wait_ms=50) as server:
        clients = [server.connect() for _ in range(3)]
        for client in clients:
            client.send(packb(state_observation()))
        answers = [client.recv(timeout=120) for client in clients]
        values = server.scrape()
    passed = sum(isinstance(answer, bytes) for answer in answers)
    assert passed >= 2 and values['acrlpd_requests_total{result="ok"}'] == passed


def held(policy: ServingPolicy, begun: threading.Event, released: threading.Event) -> ServingPolicy:
    """The same policy, whose first call says that it has begun and ends when it is released."""

    def outputs(data: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        assert released.wait(120)
        return policy.policy.outputs(data)

    return with_transforms(policy, outputs=outputs)


def test_the_requests_of_clients_that_have_gone_do_not_stay(policy: ServingPolicy) -> None:
    """A robot that loses its connection again and again must not fill the queue that the others wait in."""
    begun, released = threading.Event(), threading.Event()
    with RunningServer(held(policy, begun, released), max_concurrent_requests=2) as server:
        patient = server.connect()
        patient.send(packb(state_observation()))
        assert begun.wait(120)
        for _ in range(3):
            gone = server.connect()
            gone.send(packb(state_observation()))
            wait_for(lambda: server.scrape()["acrlpd_waiting_requests"] == 1)
            gone.close()
            wait_for(lambda: server.scrape()["acrlpd_waiting_requests"] == 0)
        released.set()
        assert "actions" in unpackb(patient.recv(timeout=120))
        assert "actions" in ask(server.connect(), state_observation())
        values = server.scrape()
    assert (values['acrlpd_requests_total{result="busy"}'], values["acrlpd_infer_seconds_count"]) == (0, 2)


def test_requests_above_the_number_are_refused_at_once(policy: ServingPolicy) -> None:
    begun, released = threading.Event(), threading.Event()
    with RunningServer(held(policy, begun, released), max_concurrent_requests=1) as server:
        first, second = server.connect(), server.connect()
        first.send(packb(state_observation()))
        assert begun.wait(120)
        assert ask(second, state_observation()).startswith("busy: 1 requests are under way, the most that this server")
        with pytest.raises(ConnectionClosed):
            second.recv(timeout=120)
        released.set()
        assert "actions" in unpackb(first.recv(timeout=120))
        assert "actions" in ask(server.connect(), state_observation())  # there is room again
        values = server.scrape()
    assert (values['acrlpd_requests_total{result="busy"}'], values['acrlpd_requests_total{result="ok"}']) == (1, 2)


def test_a_stopping_server_answers_the_requests_under_way(policy: ServingPolicy) -> None:
    begun = threading.Event()
    with RunningServer(slow(policy, 0.5, begun)) as server:
        idle, busy = server.connect(), server.connect()
        busy.send(packb(state_observation()))
        assert begun.wait(120)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert "actions" in unpackb(busy.recv(timeout=120))
        for connection in (idle, busy):
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=120)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        stopping.join(120)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(server_port(idle))), timeout=2)


def server_port(connection: Any) -> int:
    return connection.remote_address[1]


def test_the_server_reports_an_error_of_the_device_and_goes_on(policy: ServingPolicy) -> None:
    broken = with_transforms(policy, outputs=lambda data: 1 / 0)
    with RunningServer(broken) as server:
        with server.connect() as connection:
            assert "error in the policy server: ZeroDivisionError" in ask(connection, state_observation())
        server.loop.call_soon_threadsafe(setattr, server.server, "policy", policy)
        with server.connect() as connection:
            assert "actions" in ask(connection, state_observation())
