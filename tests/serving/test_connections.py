"""No client takes the places of the others, and connections are encrypted where the server has a certificate."""

import contextlib
import http.client
import logging
import socket
import ssl
from pathlib import Path

import pytest
from certificates import Certificates, make_certificates
from serving_helpers import RunningServer, ask, state_observation, wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from acrlpd.serving.message_format import packb
from acrlpd.serving.secrets import create_tls_context
from acrlpd.serving.serving_policy import ServingPolicy

HALF_A_HANDSHAKE = b"GET / HTTP/1.1\r\nHost: here\r\n"
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def open_socket(server: RunningServer, address: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of this machine; all of 127.0.0.0/8 is this machine."""
    return socket.create_connection(("127.0.0.1", server.server.port), timeout=60, source_address=(address, 0))


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server closes a connection."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    return True


def health(server: RunningServer, certificates: Certificates) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.server.port, timeout=60)
    if server.url.startswith("wss"):
        context = certificates.client_context()
        connection = http.client.HTTPSConnection("127.0.0.1", server.server.port, timeout=60, context=context)
    connection.request("GET", "/healthz")
    return connection.getresponse().read()


def test_idle_clients_lose_their_places(policy: ServingPolicy) -> None:
    with RunningServer(policy, max_clients=2, idle_timeout_s=1.0) as server:
        idle = [server.connect() for _ in range(2)]
        idle[1].socket.sendall(b"\x82\xfe\x10\x00abcd half a frame")  # half a message is no request
        for client in idle:
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
            assert closed.value.rcvd.reason == "no request for 1 s (--idle_timeout_s)"
        wait_for(lambda: server.scrape()["acrlpd_clients"] == 0)
        assert server.scrape()['acrlpd_closed_connections_total{reason="idle"}'] == 2
        with server.connect() as welcome:
            assert "actions" in ask(welcome, state_observation())


def test_an_address_has_a_share_of_the_places(policy: ServingPolicy) -> None:
    with (
        RunningServer(policy, max_clients=4, max_clients_per_address=2) as server,
        server.connect(),
        server.connect() as second,
    ):
        with pytest.raises(InvalidStatus) as refused:
            server.connect()
        assert refused.value.response.status_code == 429
        assert b"your address has 2 clients, the most that one address may have" in refused.value.response.body
        with connect(server.url, sock=open_socket(server, "127.0.0.2"), compression=None) as other:
            other.recv()
            assert "actions" in ask(other, state_observation())
            assert server.scrape()['acrlpd_refused_connections_total{reason="address_full"}'] == 1
        assert "actions" in ask(second, state_observation())
        second.close()
        wait_for(lambda: server.scrape()["acrlpd_clients"] == 1)
        with server.connect() as third:
            assert "actions" in ask(third, state_observation())


def test_connections_without_a_handshake_have_a_share_too(policy: ServingPolicy) -> None:
    with RunningServer(policy, max_clients=4, max_clients_per_address=2) as server:
        silent = [open_socket(server) for _ in range(2)]
        assert is_closed(open_socket(server))
        with connect(server.url, sock=open_socket(server, "127.0.0.2"), compression=None) as other:
            other.recv()
            assert "actions" in ask(other, state_observation())
        for connection in silent:
            connection.close()
        wait_for(lambda: server.scrape()['acrlpd_refused_connections_total{reason="handshakes"}'] >= 1)


def test_a_connection_that_ends_with_its_handshake_takes_no_place(policy: ServingPolicy) -> None:
    """The flood of frames in the packet of the handshake ends the connection before the handshake is answered."""
    with RunningServer(policy, max_clients=2) as server:
        for _ in range(4):
            flooding = open_socket(server)
            flooding.sendall(HANDSHAKE + 200 * b"\x89\x80\0\0\0\0")
            assert is_closed(flooding)
        assert server.scrape()["acrlpd_clients"] == 0
        with server.connect() as first, server.connect() as second:
            assert "actions" in ask(first, state_observation()) and "actions" in ask(second, state_observation())


@pytest.mark.parametrize(
    ("first", "frame"),
    [(b"", b"\x89\x80\0\0\0\0"), (b"\x02\x80\0\0\0\0", b"\x00\x80\0\0\0\0"), (b"", b"\x82\x80\0\0\0\0")],
    ids=["pings", "pieces of a message", "messages"],
)
def test_a_flood_of_empty_frames_ends_its_connection(policy: ServingPolicy, first: bytes, frame: bytes) -> None:
    with RunningServer(policy) as server, server.connect() as good:
        flooding = server.connect()
        with contextlib.suppress(OSError):  # the server does not wait for the end
            flooding.socket.sendall(first + 40_000 * frame)
        with pytest.raises(ConnectionClosed):
            flooding.recv(timeout=60)
        assert "actions" in ask(good, state_observation())
        wait_for(lambda: server.scrape()['acrlpd_closed_connections_total{reason="flood"}'] == 1)


def test_a_large_message_in_many_pieces_is_no_flood(policy: ServingPolicy) -> None:
    """The library sends a message in pieces if it is given one; each piece may come in a read of its own."""
    message = packb(state_observation(filling=bytes(2**20)))
    with RunningServer(policy) as server, server.connect() as connection:
        connection.send(message[start : start + 2**15] for start in range(0, len(message), 2**15))
        assert isinstance(connection.recv(timeout=60), bytes)


PING = b"\x89\xfd\0\0\0\0" + bytes(125)
# More unsent bytes than this, and the websockets library waits for the client before it goes on.
PAUSED = 2**17


def masked(message: bytes) -> bytes:
    """A binary frame as a client sends it, with a mask of zeros."""
    return bytes([0x82, 0x80 | len(message)]) + bytes(4) + message


def client_that_receives_nothing(server: RunningServer, unsent: int) -> socket.socket:
    """A client that sends pings, and does not receive the answers until `unsent` bytes wait in the server."""
    deaf = socket.socket()
    deaf.settimeout(60)
    deaf.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)  # the system keeps little, so few pings are enough
    deaf.connect(("127.0.0.1", server.server.port))
    deaf.sendall(HANDSHAKE)
    wait_for(lambda: server.scrape()["acrlpd_clients"] == 1)
    [client] = server.server._connections.clients
    # The library's own pings would end the connection sooner or later.
    server.loop.call_soon_threadsafe(client.keepalive_task.cancel)
    client.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
    while client.transport.get_write_buffer_size() < unsent and server.scrape()["acrlpd_clients"] == 1:
        with contextlib.suppress(ConnectionError):  # the server has ended the connection
            deaf.sendall(20 * PING)  # few enough for one read; the page of metrics comes after the server has read them
    return deaf


def test_the_answers_to_pings_do_not_fill_the_memory(policy: ServingPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acrlpd.serving.connections._MAX_UNSENT_BYTES", 2**16)
    with RunningServer(policy) as server, client_that_receives_nothing(server, 2**18) as deaf:
        assert is_closed(deaf)
        assert server.scrape()['acrlpd_closed_connections_total{reason="flood"}'] == 1


@pytest.mark.parametrize("has_request", [False, True], ids=["idle", "with a request"])
def test_a_client_that_receives_nothing_does_not_hold_up_the_end(
    policy: ServingPolicy, has_request: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the time for a goodbye can end the connection: all other limits are longer than the test waits."""
    monkeypatch.setattr("acrlpd.serving.server._GOODBYE_SECONDS", 0.2)
    with (
        RunningServer(policy, request_timeout_s=600, drain_timeout_s=600) as server,
        client_that_receives_nothing(server, PAUSED) as deaf,
    ):
        if has_request:
            deaf.sendall(masked(packb(state_observation())))
            wait_for(lambda: server.scrape()['acrlpd_requests_total{result="ok"}'] == 1)
        server.stop()
        assert is_closed(deaf)


def test_an_idle_client_that_receives_nothing_loses_its_place(
    policy: ServingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acrlpd.serving.server._GOODBYE_SECONDS", 0.2)
    with (
        RunningServer(policy, idle_timeout_s=2) as server,
        client_that_receives_nothing(server, PAUSED) as deaf,
    ):
        wait_for(lambda: server.scrape()["acrlpd_clients"] == 0)
        assert is_closed(deaf)


@pytest.mark.parametrize("encrypted", [False, True])
def test_half_a_handshake_does_not_hold_up_the_end(
    policy: ServingPolicy, certificates: Certificates, encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tls = create_tls_context(certificates.cert, certificates.key) if encrypted else None
    with caplog.at_level(logging.WARNING), RunningServer(policy, tls=tls, drain_timeout_s=0.5) as server:
        half, silent = open_socket(server), open_socket(server)
        half.sendall(b"\x16\x03\x01" if encrypted else HALF_A_HANDSHAKE)
        assert health(server, certificates) == b"OK\n"  # so the server has taken the connections before this one
        server.stop()
        assert is_closed(half) and is_closed(silent)
    assert caplog.text == ""  # the server would say that it had to give up


def test_a_key_that_comes_twice_or_is_no_text_is_refused_with_words(policy: ServingPolicy) -> None:
    with RunningServer(policy, api_key="secret") as server:
        for keys in ([b"Api-Key secret", b"Api-Key secret"], [b"Api-Key \xff"], []):
            connection = http.client.HTTPConnection("127.0.0.1", server.server.port, timeout=60)
            connection.putrequest("GET", "/metrics")
            for key in keys:
                connection.putheader("Authorization", key)
            connection.endheaders()
            response = connection.getresponse()
            told = response.read().decode()
            assert response.status == 401
            assert told == (
                f"this server needs one header 'Authorization: Api-Key <key>' with its key; found {len(keys)}\n"
            )


def test_an_encrypted_connection(policy: ServingPolicy, certificates: Certificates) -> None:
    tls = create_tls_context(certificates.cert, certificates.key)
    with RunningServer(policy, tls=tls) as server:
        with server.connect(ssl=certificates.client_context()) as client:
            assert client.socket.version() in ("TLSv1.2", "TLSv1.3")  # type: ignore[attr-defined]
            assert "actions" in ask(client, state_observation())
        assert health(server, certificates) == b"OK\n"
        with pytest.raises(ssl.SSLCertVerificationError):  # nobody vouches for the certificate
            server.connect()
        with open_socket(server) as plain:
            plain.sendall(HALF_A_HANDSHAKE + b"\r\n")
            assert is_closed(plain)


def test_certificate_files_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tls_cert needs --tls_key"):
        create_tls_context(certificates.cert, None)
    with pytest.raises(ValueError, match="--tls_key needs --tls_cert"):
        create_tls_context(None, certificates.key)
    with pytest.raises(ValueError, match=r"--tls_key .*nowhere cannot be read: .*No such file"):
        create_tls_context(certificates.cert, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--tls_cert .*nowhere and .* cannot be used: .*No such file"):
        create_tls_context(tmp_path / "nowhere", certificates.key)
    with pytest.raises(ValueError, match=r"cannot be used: .*Expected PEM files"):
        create_tls_context(certificates.key, certificates.key)  # no certificate
    public = tmp_path / "key.pem"
    public.write_bytes(certificates.key.read_bytes())
    public.chmod(0o644)
    with pytest.raises(ValueError, match=r"every user of this machine can read or write .*key.pem \(mode 644\)"):
        create_tls_context(certificates.cert, public)


def test_a_key_with_a_passphrase_is_refused_without_a_question(certificates: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(certificates.key.read_bytes(), password=None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    locked.chmod(0o600)
    with pytest.raises(ValueError, match="its private key without a passphrase"):
        create_tls_context(certificates.cert, locked)
