"""The connections of a server, and how much of the server one address or one connection may take."""

import asyncio
import http
from collections import Counter
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Response
from websockets.protocol import Event

from acrlpd.serving.metrics import ServerMetrics

# One read of a socket brings at most 256 KiB. It could hold 40,000 empty frames, which take the event loop seconds. A
# client of openpi's protocol waits for each answer, so a read of its data holds a few frames.
_PIECE = 8192
_MAX_FRAMES_PER_READ = 64
# The answers to pings are kept until the client receives them. A client that sends pings and receives nothing would
# fill the memory. A reply is much smaller than this bound.
_MAX_UNSENT_BYTES = 16 * 2**20


class Connections:
    """Knows all connections from their first byte on, so that no address can take the places of the others."""

    def __init__(self, *, max_clients: int, max_clients_per_address: int, metrics: ServerMetrics) -> None:
        self.clients: set[ServerConnection] = set()
        self._max_clients = max_clients
        self._max_per_address = max_clients_per_address
        self._metrics = metrics
        self._addresses: dict[ServerConnection, str] = {}

    def create(self, *args: Any, **options: Any) -> ServerConnection:
        """What websockets calls for each new connection."""
        return _Connection(self, *args, **options)

    def admit(self, connection: ServerConnection) -> Response | None:
        """Gives a connection the place of a client, or a response that says why there is no place."""
        address = self._addresses.get(connection)
        if address is None:  # The connection ended before its handshake was read, and nobody would free its place.
            return connection.respond(http.HTTPStatus.BAD_REQUEST, "the connection has ended\n")
        if len(self.clients) >= self._max_clients:
            self._metrics.refused_connections.labels("full").inc()
            text = f"the server has {len(self.clients)} clients, the most that it takes (--max_clients)\n"
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        if sum(self._addresses[client] == address for client in self.clients) >= self._max_per_address:
            self._metrics.refused_connections.labels("address_full").inc()
            text = (
                f"your address has {self._max_per_address} clients, the most that one address may have "
                "(--max_clients_per_address)\n"
            )
            return connection.respond(http.HTTPStatus.TOO_MANY_REQUESTS, text)
        self.clients.add(connection)
        return None

    def abort_handshakes(self) -> None:
        """Ends the connections that have not become clients, so that a stopping server does not wait for them."""
        for connection in self._addresses.keys() - self.clients:
            connection.transport.abort()

    def begin(self, connection: ServerConnection) -> None:
        """Notes a new connection. Connections without a handshake take file handles, so their number is bounded too."""
        address = str((connection.remote_address or ("unknown",))[0])
        self._addresses[connection] = address
        waiting = Counter(self._addresses[other] for other in self._addresses.keys() - self.clients)
        if waiting.total() > self._max_clients or waiting[address] > self._max_per_address:
            self._metrics.refused_connections.labels("handshakes").inc()
            connection.transport.abort()

    def end(self, connection: ServerConnection) -> None:
        self._addresses.pop(connection, None)
        self.clients.discard(connection)

    def close_flooding(self, connection: ServerConnection) -> None:
        self._metrics.closed_connections.labels("flood").inc()
        connection.transport.abort()


class _Connection(ServerConnection):
    """Tells of its beginning and its end, and reads in pieces, so that a flood of frames ends with a piece."""

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._frames = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.end(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._frames = 0
        for start in range(0, len(data), _PIECE):
            super().data_received(data[start : start + _PIECE])
            has_unsent = self.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES
            if has_unsent or self._frames > _MAX_FRAMES_PER_READ:
                self._connections.close_flooding(self)
                return

    def process_event(self, event: Event) -> None:
        self._frames += 1
        super().process_event(event)
