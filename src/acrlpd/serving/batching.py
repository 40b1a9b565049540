"""Requests of several clients share one call of the policy, and no client waits long for the others."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from acrlpd.serving.metrics import ServerMetrics
from acrlpd.serving.requests import RequestError
from acrlpd.serving.serving_policy import Request


@dataclasses.dataclass(eq=False)
class _Waiting:
    request: Request
    arrived: float
    reply: "asyncio.Future[dict[str, Any]]"

    @property
    def key(self) -> tuple[int, int]:
        """Requests with the same key can share a call."""
        return id(self.request.policy), self.request.options.num_steps


class Batcher:
    """Collects requests while the device is busy, and waits a moment longer if more requests are likely to come.

    More requests are likely to come if the last call was shared, or if the oldest request had to wait for the end of
    the last call. Clients whose requests do not overlap lose no time. `expected` is the number of connected clients,
    which is the most requests that can come.

    The device waits for more requests at most `max_wait_s`, or a fifth of the duration of a call where that is longer:
    the messages of large models are large and take longer to arrive. With a `max_wait_s` of 0 the device never waits.
    The wait begins when the device becomes free. If it began with the arrival of the request, clients would split
    for good into two groups that take turns.
    """

    def __init__(self, *, max_wait_s: float, expected: Callable[[], int], metrics: ServerMetrics) -> None:
        self._max_wait_s = max_wait_s
        self._expected = expected
        self._metrics = metrics
        self._call_s = 0.0  # duration of the last call
        self._was_shared = False  # whether the last call had more than one request
        self._free_since = 0.0
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._device = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="acrlpd-device")
        self._worker = asyncio.create_task(self._run())

    def __len__(self) -> int:
        return len(self._queue)

    async def submit(self, request: Request) -> dict[str, Any]:
        """The reply to a request; a cancelled task leaves the queue."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.time(), loop.create_future())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            return await waiting.reply
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)

    async def close(self) -> None:
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._device.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._collect()
            requests = [waiting.request for waiting in batch]
            started = loop.time()
            try:
                replies = await loop.run_in_executor(self._device, requests[0].policy.infer, requests)
            except Exception as error:  # an error of the device belongs to these requests; the others go on
                for waiting in batch:
                    if not waiting.reply.done():
                        waiting.reply.set_exception(error)
                continue
            self._free_since = loop.time()
            self._call_s = self._free_since - started
            self._was_shared = len(batch) > 1
            self._metrics.infer_seconds.observe(self._call_s)
            self._metrics.batch_size.observe(len(batch))
            for waiting, reply in zip(batch, replies, strict=True):
                if waiting.reply.done():  # the client has gone
                    continue
                if isinstance(reply, RequestError):
                    waiting.reply.set_exception(reply)
                else:
                    timing = {"queue_ms": 1000 * (started - waiting.arrived), "batch_size": len(batch)}
                    waiting.reply.set_result({**reply, "server_timing": timing})

    async def _collect(self) -> list[_Waiting]:
        """Waits for the requests of the next call: the oldest one, and those that can share a call with it."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            oldest = self._queue[0]
            limit = min(oldest.request.policy.max_batch_size, max(self._expected(), 1))
            more_likely = self._was_shared or oldest.arrived < self._free_since
            wait = max(self._max_wait_s, 0.2 * self._call_s) if self._max_wait_s > 0 and more_likely else 0.0
            remaining = max(oldest.arrived, self._free_since) + wait - loop.time()
            batch = [waiting for waiting in self._queue if waiting.key == oldest.key][:limit]
            if len(batch) == limit or remaining <= 0:
                for waiting in batch:
                    self._queue.remove(waiting)
                return batch
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), remaining)
