"""openpi's policy server protocol: websocket frames of msgpack, metadata first, errors as text.

A connection has one request under way at a time, and the number of connections is bounded, so that the memory of the
server is bounded too. A client that sends nonsense, stalls or vanishes ends its own connection and no other. What reads
a message takes a bounded time, so that no client can make the others wait.
"""

import asyncio
import concurrent.futures
import dataclasses
import hmac
import http
import logging
import math
import socket
import ssl
import time
from typing import Annotated

from annotated_types import Gt, Interval
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request as HTTPRequest
from websockets.http11 import Response

from acrlpd.config.bounds import require_bounds
from acrlpd.cores import usable_cores
from acrlpd.serving.batching import Batcher
from acrlpd.serving.connections import Connections
from acrlpd.serving.message_format import MessageError, packb, shortened, unpackb
from acrlpd.serving.metrics import ServerMetrics
from acrlpd.serving.requests import RequestError
from acrlpd.serving.serving_policy import Request, ServingPolicy

logger = logging.getLogger(__name__)
# The websockets library would log a traceback for every port scanner and every lost connection.
_quiet = logging.getLogger(f"{__name__}.connections")
_quiet.setLevel(logging.CRITICAL)
# Messages up to this many bytes are unpacked and prepared in the event loop: three images of 224 pixels, as openpi's
# client sends them, are read in less time than a thread takes to start. Larger images have to be resized, which would
# delay the other clients.
_SMALL_MESSAGE = 512 * 2**10
_MAX_ERROR_LENGTH = 1000
# Longest time that a client takes to receive and confirm the end of its connection; then its place is free.
_GOODBYE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where to listen, and the bounds of what clients can ask of the server."""

    host: str = "127.0.0.1"
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000  # 0 means any free port
    api_key: str | None = None
    tls: ssl.SSLContext | None = None  # None: connections are not encrypted
    # Longest time that a request waits for others to share a call with, or a fifth of a call where that is longer.
    max_wait_ms: Annotated[float, Interval(ge=0, lt=math.inf)] = 5.0
    max_message_bytes: Annotated[int, Gt(0)] = 32 * 2**20
    max_clients: Annotated[int, Gt(0)] = 64
    max_clients_per_address: Annotated[int, Gt(0)] = 16
    # Longest time that a client keeps its place without a request.
    idle_timeout_s: Annotated[float, Interval(gt=0, lt=math.inf)] = 600.0
    # Requests under way at a time; further requests are refused at once. None: one for each client.
    max_concurrent_requests: Annotated[int | None, Gt(0)] = None
    # Longest time until a request is answered, and longest time until its client has received the answer.
    request_timeout_s: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0
    # Longest time that a stopping server waits for the requests under way.
    drain_timeout_s: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0

    def __post_init__(self) -> None:
        require_bounds(self)

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

    def __init__(self, policy: ServingPolicy, options: ServerOptions) -> None:
        self.policy = policy
        self.metrics = ServerMetrics()
        self.options = options
        self._connections = Connections(
            max_clients=options.max_clients,
            max_clients_per_address=options.max_clients_per_address,
            metrics=self.metrics,
        )
        self._idle: set[ServerConnection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._answers: set[asyncio.Task[bytes | str]] = set()  # to the requests under way
        self._draining = False
        self._is_following: bool | None = None  # None: nobody asked for it
        self._prepare_pool = concurrent.futures.ThreadPoolExecutor(
            min(4, usable_cores()), thread_name_prefix="acrlpd-prepare"
        )

    async def start(self) -> None:
        """Listens for clients. Warm the policy up before, or the first request waits for the compilation."""
        options = self.options
        self._batcher = Batcher(
            max_wait_s=options.max_wait_ms / 1000,
            expected=self._expected_requests,
            metrics=self.metrics,
        )
        self.metrics.clients.set_function(lambda: len(self._connections.clients))
        self.metrics.waiting.set_function(lambda: len(self._batcher))
        self.metrics.step.set_function(lambda: -1 if self.policy.step is None else self.policy.step)
        self._server: Server = await serve(
            self._serve_client,
            options.host,
            options.port,
            compression=None,
            max_size=options.max_message_bytes,
            max_queue=1,
            close_timeout=_GOODBYE_SECONDS,
            process_request=self._process_request,
            create_connection=self._connections.create,  # type: ignore[arg-type]  # websockets only calls it
            ssl=options.tls,
            logger=_quiet,
        )

    @property
    def port(self) -> int:
        return self._server.sockets[0].getsockname()[1]

    def set_following(self, is_following: bool) -> None:
        """Notes for /metrics and /healthz whether a follower looks for newer checkpoints at present."""
        self._is_following = is_following
        self.metrics.following.set(is_following)

    async def drain(self) -> None:
        """Stops the server: takes no new client, answers the requests under way, and closes the idle connections.

        How long this takes depends on the requests alone: clients have a fixed time to receive answers and goodbyes.
        """
        self._draining = True
        self._server.close(close_connections=False)
        self._connections.abort_handshakes()
        goodbyes = [_say_goodbye(client, CloseCode.GOING_AWAY, "the server is stopping") for client in self._idle]
        await asyncio.gather(*goodbyes)
        if self._answers:
            await asyncio.wait(self._answers, timeout=self.options.drain_timeout_s)
        # Not `Server.wait_closed`, which would also wait for clients that have begun a TLS handshake and are silent.
        if self._handlers and (await asyncio.wait(self._handlers, timeout=2 * _GOODBYE_SECONDS))[1]:
            logger.warning("%d clients did not finish in time", len(self._connections.clients))
            for client in list(self._connections.clients):
                client.transport.abort()
        await self._batcher.close()
        self._prepare_pool.shutdown()

    # -- one client ----------------------------------------------------------------------------------

    async def _serve_client(self, client: ServerConnection) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        try:
            await client.send(packb(self.policy.metadata()))
            total_ms: float | None = None
            while not self._draining:
                message = await self._receive(client)
                if message is None:
                    return
                start = time.perf_counter()
                # Asked before the request is counted, so that of many at once the first ones pass.
                reply = (
                    self._refuse_busy() if self._is_busy else await self._answer_unless_gone(client, message, total_ms)
                )
                if reply is None:
                    return
                await asyncio.wait_for(client.send(reply), self.options.request_timeout_s)
                total_ms = 1000 * (time.perf_counter() - start)
                if isinstance(reply, str):
                    await _say_goodbye(client, CloseCode.INTERNAL_ERROR, "error in the previous frame")
                    return
            await _say_goodbye(client, CloseCode.GOING_AWAY, "the server is stopping")
        except (ConnectionClosed, TimeoutError):
            client.transport.abort()  # the client is gone, or does not receive its answer

    async def _receive(self, client: ServerConnection) -> str | bytes | None:
        """The next message; None after a client that sent no complete message for too long was told goodbye."""
        limit = self.options.idle_timeout_s
        self._idle.add(client)
        try:
            async with asyncio.timeout(limit):
                return await client.recv()
        except TimeoutError:
            self.metrics.closed_connections.labels("idle").inc()
            logger.info(
                "a client at %s sent no request for %g s; its connection is closed", client.remote_address, limit
            )
            await _say_goodbye(client, CloseCode.POLICY_VIOLATION, f"no request for {limit:g} s (--idle_timeout_s)")
            return None
        finally:
            self._idle.discard(client)

    @property
    def _is_busy(self) -> bool:
        limit = self.options.max_concurrent_requests
        return limit is not None and len(self._answers) >= limit

    def _refuse_busy(self) -> str:
        self.metrics.requests.labels("busy").inc()
        return (
            f"busy: {self.options.max_concurrent_requests} requests are under way, the most that this server takes at "
            "a time (--max_concurrent_requests); connect again and repeat the request"
        )

    def _expected_requests(self) -> int:
        """How many requests may arrive together."""
        clients, limit = len(self._connections.clients), self.options.max_concurrent_requests
        return clients if limit is None else min(clients, limit)

    async def _answer_unless_gone(
        self, client: ServerConnection, message: str | bytes, previous_ms: float | None
    ) -> bytes | str | None:
        """The answer to a message; None if the client goes meanwhile.

        The request of a client that has gone must not stay: the client may connect again and ask again, and soon the
        requests of nobody would take the device, the memory and the number of requests from the other clients.
        """
        answer = asyncio.create_task(self._answer(message, previous_ms))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        gone = asyncio.create_task(client.wait_closed())
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if answer.done():
            return answer.result()
        answer.cancel()
        return None

    async def _answer(self, message: str | bytes, previous_ms: float | None) -> bytes | str:
        """A packed reply, or text that says what went wrong."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                reply = await self._batcher.submit(await self._prepare(message))
        except (RequestError, MessageError) as error:
            self.metrics.requests.labels("bad_request").inc()
            return f"bad request: {shortened(str(error), _MAX_ERROR_LENGTH)}"
        except TimeoutError:
            self.metrics.requests.labels("timeout").inc()
            return f"no answer within {self.options.request_timeout_s:g} s: the server is overloaded"
        except Exception as error:  # a bug or an error of the device: the server logs it and goes on
            self.metrics.requests.labels("error").inc()
            logger.exception("a request failed")
            return f"error in the policy server: {type(error).__name__}: {shortened(str(error), _MAX_ERROR_LENGTH)}"
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
            # The status stays OK: clients are served, and a restart of the server would help nobody.
            has_ended = self._is_following is False
            problem = "--follow has ended by an error and begins again; see the log\n" if has_ended else ""
            return client.respond(http.HTTPStatus.OK, f"OK\n{problem}")
        given = request.headers.get_all("Authorization")
        if not self._is_authorized(given):
            self.metrics.refused_connections.labels("unauthorized").inc()
            text = f"this server needs one header 'Authorization: Api-Key <key>' with its key; found {len(given)}\n"
            return client.respond(http.HTTPStatus.UNAUTHORIZED, text)
        if request.path == "/metrics":
            return client.respond(http.HTTPStatus.OK, self.metrics.text())
        return self._connections.admit(client)

    def _is_authorized(self, given: list[str]) -> bool:
        if self.options.api_key is None:
            return True
        expected = f"Api-Key {self.options.api_key}".encode()
        # Bytes that are not text arrive as surrogates, which a plain encode() refuses.
        return len(given) == 1 and hmac.compare_digest(given[0].encode(errors="surrogateescape"), expected)


async def _say_goodbye(client: ServerConnection, code: CloseCode, reason: str) -> None:
    """Closes a connection. A client that receives nothing is not waited for, as `ServerConnection.close` would do."""
    try:
        async with asyncio.timeout(_GOODBYE_SECONDS):
            await client.close(code, reason)
    except TimeoutError:
        client.transport.abort()
