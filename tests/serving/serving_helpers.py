"""Tiny served policies, what robots send to them, and a server in a thread."""

import asyncio
import concurrent.futures
import http.client
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="websockets is missing: pip install 'acrlpd[serve]'")

from small_checkpoints import make_agent, serve, served_model, state_config
from toy_agent import NORM_STATS
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from acrlpd.serving.message_format import packb, unpackb
from acrlpd.serving.server import PolicyServer, ServerOptions
from acrlpd.serving.serving_policy import ServingPolicy

STATE_DIM = 3


def pi0_observation(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What a robot sends to a policy of `pi0_config`."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (40, 56, 3), np.uint8)
    return {"state": rng.standard_normal(STATE_DIM), "images": {"base_0_rgb": image}, "prompt": "go left"} | changes


def state_observation(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What a robot sends to a policy of `state_config`."""
    return {"state": np.random.default_rng(seed).standard_normal(STATE_DIM).astype(np.float32)} | changes


def state_policy(seed: int = 0, **options: Any) -> ServingPolicy:
    """A warm policy of `state_config`."""
    config = state_config()
    options = {"best_of_n": 4, "num_steps": (2, 1), "max_batch_size": 8} | options
    policy = serve(served_model(make_agent(config, seed)), config, NORM_STATS, **options)
    policy.warm_up()
    return policy


class RunningServer:
    """A server with its own event loop in a thread, on a free port of the loopback interface."""

    def __init__(self, policy: ServingPolicy, **options: Any) -> None:
        self._policy, self._options = policy, ServerOptions(port=0, **options)

    def __enter__(self) -> "RunningServer":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self._thread.start()
        assert started.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _run(self, started: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.server = PolicyServer(self._policy, self._options)
        await self.server.start()
        started.set()
        await self._stop.wait()
        await self.server.drain()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"{'wss' if self._options.tls else 'ws'}://127.0.0.1:{self.server.port}"

    def connect(self, **options: Any) -> Connection:
        """A plain websocket that has taken the metadata."""
        connection = connect(self.url, compression=None, max_size=None, open_timeout=120, **options).__enter__()
        connection.recv(timeout=120)
        return connection

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text of a plain HTTP request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def scrape(self, **headers: str) -> dict[str, float]:
        """What /metrics says: 'name{label="value"}' -> number."""
        status, text = self.get("/metrics", **headers)
        assert status == 200
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}


def ask(connection: Connection, message: Any) -> Any:
    """The reply, or the text of an error."""
    connection.send(message if isinstance(message, (bytes, str)) else packb(message))
    reply = connection.recv(timeout=120)
    return reply if isinstance(reply, str) else unpackb(reply)


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
