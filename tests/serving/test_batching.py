"""Who shares a call with whom, with a device that takes its time."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from acrlpd.serving.batching import Batcher
from acrlpd.serving.metrics import ServerMetrics


@dataclasses.dataclass(eq=False)
class SlowPolicy:
    """Answers after a fifth of a second, however many ask."""

    max_batch_size: int = 8
    sizes: list[int] = dataclasses.field(default_factory=list)

    def infer(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        self.sizes.append(len(requests))
        time.sleep(0.2)
        return [{} for _ in requests]


@dataclasses.dataclass(frozen=True)
class Options:
    num_steps: int = 10


@dataclasses.dataclass(frozen=True)
class Request:
    policy: SlowPolicy
    options: Options = Options()


async def ask_repeatedly(batcher: Batcher, request: Request, *, starts_at: float, count: int) -> None:
    await asyncio.sleep(starts_at)
    for _ in range(count):
        await batcher.submit(request)  # type: ignore[arg-type]


def sizes_of_calls(max_wait_s: float, starts: Sequence[float], count: int = 6) -> list[int]:
    policy = SlowPolicy()

    async def run() -> None:
        batcher = Batcher(max_wait_s=max_wait_s, expected=lambda: len(starts), metrics=ServerMetrics())
        clients = (ask_repeatedly(batcher, Request(policy), starts_at=start, count=count) for start in starts)
        await asyncio.gather(*clients)
        await batcher.close()

    asyncio.run(run())
    return policy.sizes


def test_clients_that_came_while_others_were_answered_join_them() -> None:
    sizes = sizes_of_calls(0.05, [0.0, 0.0, 0.0, 0.15, 0.15, 0.15, 0.15, 0.15])
    assert sizes[0] == 3
    assert sizes[1:6] == [8] * 5


def test_nobody_waits_when_told_not_to() -> None:
    assert sizes_of_calls(0.0, [0.0, 0.1, 0.1], count=1) == [1, 2]


def test_two_clients_who_take_turns_find_each_other() -> None:
    assert sizes_of_calls(0.5, [0.0, 0.1]) == [1, 2, 2, 2, 2, 2, 1]


def test_clients_whose_requests_do_not_meet_do_not_wait() -> None:
    start = time.perf_counter()
    assert sizes_of_calls(10.0, [0.0, 1.0], count=1) == [1, 1]
    assert time.perf_counter() - start < 10.0


def test_only_like_requests_share_a_call() -> None:
    """While a newer checkpoint comes into service there are two policies, and a call has one number of steps."""
    old, new = SlowPolicy(), SlowPolicy()
    requests = [Request(old), Request(old), Request(new), Request(old, Options(num_steps=5)), Request(new)]

    async def run() -> None:
        batcher = Batcher(max_wait_s=0.0, expected=lambda: len(requests), metrics=ServerMetrics())
        await asyncio.gather(*(batcher.submit(request) for request in requests))  # type: ignore[arg-type]
        await batcher.close()

    asyncio.run(run())
    assert (old.sizes, new.sizes) == ([2, 1], [2])


def test_nobody_computes_for_a_client_that_has_gone() -> None:
    policy = SlowPolicy()

    async def run() -> None:
        batcher = Batcher(max_wait_s=0.0, expected=lambda: 2, metrics=ServerMetrics())
        first = asyncio.create_task(batcher.submit(Request(policy)))  # type: ignore[arg-type]
        while not policy.sizes:  # the device is busy
            await asyncio.sleep(0.01)
        second = asyncio.create_task(batcher.submit(Request(policy)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert len(batcher) == 1
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert len(batcher) == 0
        await asyncio.sleep(0.01)
        await batcher.close()

    asyncio.run(run())
    assert policy.sizes == [1]


def test_a_client_that_is_alone_does_not_wait() -> None:
    start = time.perf_counter()
    assert sizes_of_calls(10.0, [0.0], count=3) == [1, 1, 1]
    assert time.perf_counter() - start < 10.0
