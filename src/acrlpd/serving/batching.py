"""Requests of several clients share one call of the policy, without making any of them wait long."""

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
    """Collects requests while the device is busy, and a moment longer if more clients are about to ask.

    More are when clients get in each other's way: the last call was shared, or somebody had to wait for its
    end. Clients whose requests do not meet lose no time; `expected`, the number of connected clients, is the
    most that can come. Nobody keeps the device waiting for company more than `max_wait_s`, or a fifth of what
    a call takes where that is longer: large models take large messages, which do not come at once. With a
    `max_wait_s` of 0 nobody waits.

    The wait begins when the device is free. If it began with the request, clients would split for good
    into those who are answered and those who wait meanwhile.
    """

    def __init__(self, *, max_wait_s: float, expected: Callable[[], int], metrics: ServerMetrics) -> None:
        self._max_wait_s = max_wait_s
        self._expected = expected
        self._metrics = metrics
        self._call_s = 0.0  # of the last call
        self._was_shared = False  # the last call
        self._free_since = 0.0
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._device = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="acrlpd-device")
        self._worker = asyncio.create_task(self._run())

    def __len__(self) -> int:
        return len(self._queue)

    async def submit(self, request: Request) -> dict[str, Any]:
        """The reply to a request; leaving early takes it out of the queue."""
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
            started = loop.time()
            infer = batch[0].request.policy.infer
            try:
                replies = await loop.run_in_executor(self._device, infer, [waiting.request for waiting in batch])
            except Exception as error:  # whatever the device says belongs to these requests; others go on
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
                if waiting.reply.done():  # its client has gone
                    continue
                if isinstance(reply, RequestError):
                    waiting.reply.set_exception(reply)
                else:
                    timing = {"queue_ms": 1000 * (started - waiting.arrived), "batch_size": len(batch)}
                    waiting.reply.set_result({**reply, "server_timing": timing})

    async def _collect(self) -> list[_Waiting]:
        """The requests of the next call: those that can share one with the oldest."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            oldest = self._queue[0]
            limit = min(oldest.request.policy.max_batch_size, max(self._expected(), 1))
            company = self._max_wait_s > 0 and (self._was_shared or oldest.arrived < self._free_since)
            wait = max(self._max_wait_s, 0.2 * self._call_s) if company else 0.0
            remaining = max(oldest.arrived, self._free_since) + wait - loop.time()
            batch = [waiting for waiting in self._queue if waiting.key == oldest.key][:limit]
            if len(batch) == limit or remaining <= 0:
                for waiting in batch:
                    self._queue.remove(waiting)
                return batch
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), remaining)
