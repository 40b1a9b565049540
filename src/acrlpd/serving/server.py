"""openpi's policy server protocol: websocket frames of msgpack, metadata first, errors as text.

A connection has one request under way at a time, and the number of connections is bounded, so that the memory of the
server is bounded too. A client that sends nonsense, stalls or vanishes ends its own connection and no other.
"""

import asyncio
import concurrent.futures
import dataclasses
import hmac
import http
import logging
import math
import os
import socket
import time
from typing import Annotated

from annotated_types import Gt, Interval
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request as HTTPRequest
from websockets.http11 import Response

from acrlpd.config.bounds import check_bounds
from acrlpd.serving.batching import Batcher
from acrlpd.serving.message_format import MessageError, packb, unpackb
from acrlpd.serving.metrics import ServerMetrics
from acrlpd.serving.requests import RequestError
from acrlpd.serving.serving_policy import Request, ServingPolicy

logger = logging.getLogger(__name__)
# The websockets library would log a traceback for every port scanner and every lost connection.
_quiet = logging.getLogger(f"{__name__}.connections")
_quiet.setLevel(logging.CRITICAL)
# Messages up to this many bytes are prepared in the event loop: three images of 224 pixels, as openpi's client sends
# them, are read in less time than a thread takes to start. Larger images have to be resized, which would delay the
# other clients.
_SMALL_MESSAGE = 512 * 2**10


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where to listen, and the bounds of what clients can ask of the server."""

    host: str = "127.0.0.1"
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000  # 0 means any free port
    api_key: str | None = None
    # Longest time that a request waits for others to share a call with, or a fifth of a call where that is longer.
    max_wait_ms: Annotated[float, Interval(ge=0, lt=math.inf)] = 5.0
    max_message_bytes: Annotated[int, Gt(0)] = 32 * 2**20
    max_clients: Annotated[int, Gt(0)] = 64
    # Longest time until a request is answered, and longest time until its client has received the answer.
    request_timeout_s: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0
    # Longest time that a stopping server waits for the requests under way.
    drain_timeout_s: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0

    def __post_init__(self) -> None:
        for finding in check_bounds(self):
            raise ValueError(finding.message)

    def check_address(self) -> None:
        """Refuses an address on which the server cannot listen, before it reads and compiles the policy."""
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"cannot listen on {self.host}, port {self.port}: {reason}; choose another one") from error


class PolicyServer:
    """Serves its `policy`, which can be replaced while clients are connected: requests under way keep the old one."""

    def __init__(self, policy: ServingPolicy, options: ServerOptions | None = None) -> None:
        self.policy = policy
        self.metrics = ServerMetrics()
        self._options = options or ServerOptions()
        self._clients: set[ServerConnection] = set()
        self._idle: set[ServerConnection] = set()
        self._draining = False
        self._prepare_pool = concurrent.futures.ThreadPoolExecutor(
            min(4, os.cpu_count() or 1), thread_name_prefix="acrlpd-prepare"
        )

    async def start(self) -> None:
        """Listens for clients. Warm the policy up before, or the first request waits for the compilation."""
        options = self._options
        self._batcher = Batcher(
            max_wait_s=options.max_wait_ms / 1000, expected=lambda: len(self._clients), metrics=self.metrics
        )
        self.metrics.clients.set_function(lambda: len(self._clients))
        self.metrics.waiting.set_function(lambda: len(self._batcher))
        self.metrics.step.set_function(lambda: -1 if self.policy.step is None else self.policy.step)
        self._server: Server = await serve(
            self._serve_client,
            options.host,
            options.port,
            compression=None,
            max_size=options.max_message_bytes,
            max_queue=1,
            process_request=self._process_request,
            logger=_quiet,
        )

    @property
    def port(self) -> int:
        return self._server.sockets[0].getsockname()[1]

    async def drain(self) -> None:
        """Stops the server: takes no new client, answers the requests under way, and closes the idle connections."""
        self._draining = True
        self._server.close(close_connections=False)
        goodbyes = [client.close(CloseCode.GOING_AWAY, "the server is stopping") for client in self._idle]
        await asyncio.gather(*goodbyes, return_exceptions=True)
        try:
            await asyncio.wait_for(self._server.wait_closed(), self._options.drain_timeout_s)
        except TimeoutError:
            logger.warning("%d clients did not finish in time", len(self._clients))
            for client in list(self._clients):
                client.transport.abort()
        await self._batcher.close()
        self._prepare_pool.shutdown()

    # -- one client ----------------------------------------------------------------------------------

    async def _serve_client(self, client: ServerConnection) -> None:
        self._clients.add(client)
        try:
            await client.send(packb(self.policy.metadata()))
            total_ms: float | None = None
            while not self._draining:
                self._idle.add(client)
                message = await client.recv()
                self._idle.discard(client)
                start = time.perf_counter()
                reply = await self._answer(message, total_ms)
                await asyncio.wait_for(client.send(reply), self._options.request_timeout_s)
                total_ms = 1000 * (time.perf_counter() - start)
                if isinstance(reply, str):
                    await client.close(CloseCode.INTERNAL_ERROR, "error in the previous frame")
                    return
            await client.close(CloseCode.GOING_AWAY, "the server is stopping")
        except (ConnectionClosed, TimeoutError):
            client.transport.abort()  # the client is gone, or does not receive its answer
        finally:
            self._clients.discard(client)
            self._idle.discard(client)

    async def _answer(self, message: str | bytes, previous_ms: float | None) -> bytes | str:
        """A packed reply, or text that says what went wrong."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                reply = await self._batcher.submit(await self._prepare(message))
        except (RequestError, MessageError) as error:
            self.metrics.requests.labels("bad_request").inc()
            return f"bad request: {error}"
        except TimeoutError:
            self.metrics.requests.labels("timeout").inc()
            return f"no answer within {self._options.request_timeout_s:g} s: the server is overloaded"
        except Exception as error:  # a bug or an error of the device: the server logs it and goes on
            self.metrics.requests.labels("error").inc()
            logger.exception("a request failed")
            return f"error in the policy server: {type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        self.metrics.requests.labels("ok").inc()
        self.metrics.request_seconds.observe(seconds)
        reply["server_timing"]["infer_ms"] = 1000 * seconds
        if previous_ms is not None:
            reply["server_timing"]["prev_total_ms"] = previous_ms
        return packb(reply)

    async def _prepare(self, message: str | bytes) -> Request:
        if isinstance(message, str):
            raise MessageError("expected a binary frame of msgpack, found a text frame")
        policy = self.policy
        if len(message) <= _SMALL_MESSAGE:
            return policy.prepare(unpackb(message))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prepare_pool, lambda: policy.prepare(unpackb(message)))

    # -- plain HTTP ----------------------------------------------------------------------------------

    def _process_request(self, client: ServerConnection, request: HTTPRequest) -> Response | None:
        if request.path == "/healthz":
            return client.respond(http.HTTPStatus.OK, "OK\n")
        key, given = self._options.api_key, request.headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Api-Key {key}".encode()):
            self.metrics.refused_connections.labels("unauthorized").inc()
            return client.respond(
                http.HTTPStatus.UNAUTHORIZED, "this server needs the header 'Authorization: Api-Key <key>'\n"
            )
        if request.path == "/metrics":
            return client.respond(http.HTTPStatus.OK, self.metrics.text())
        if len(self._clients) >= self._options.max_clients:
            self.metrics.refused_connections.labels("full").inc()
            message = f"the server has {len(self._clients)} clients, the most that it takes\n"
            return client.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, message)
        return None
