"""Which requests share a call of the policy. The tests decide when a call ends, so no result depends on the speed."""

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from acrlpd.serving.batching import Batcher
from acrlpd.serving.metrics import ServerMetrics

FOREVER = 1000.0  # seconds; a test in which a request waits that long fails


@dataclasses.dataclass(eq=False)
class GatedPolicy:
    """Ends each call when the test opens the gate, and remembers how many requests each call had."""

    max_batch_size: int = 8
    sizes: list[int] = dataclasses.field(default_factory=list)
    gate: threading.Semaphore = dataclasses.field(default_factory=lambda: threading.Semaphore(0))

    def infer(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        self.sizes.append(len(requests))
        assert self.gate.acquire(timeout=120)
        return [{} for _ in requests]

    async def wait_for_call(self, number: int) -> None:
        while len(self.sizes) < number:
            await asyncio.sleep(0.001)


@dataclasses.dataclass(frozen=True)
class Options:
    num_steps: int = 10


@dataclasses.dataclass(frozen=True)
class Request:
    policy: GatedPolicy
    options: Options = Options()


def run(scenario: Callable[[Batcher, GatedPolicy], Awaitable[None]], *, max_wait_s: float, clients: int) -> list[int]:
    """Sizes of the calls in a scenario with so many connected clients."""
    policy = GatedPolicy()

    async def main() -> None:
        batcher = Batcher(max_wait_s=max_wait_s, expected=lambda: clients, metrics=ServerMetrics())
        async with asyncio.timeout(120):
            await scenario(batcher, policy)
        policy.gate.release(100)
        await batcher.close()

    asyncio.run(main())
    return policy.sizes


def ask(batcher: Batcher, policy: GatedPolicy, times: int = 1) -> "asyncio.Task[None]":
    """A client that asks again as soon as it has its answer."""

    async def client() -> None:
        for _ in range(times):
            await batcher.submit(Request(policy))  # type: ignore[arg-type]

    return asyncio.create_task(client())


def test_clients_that_ask_during_a_call_share_the_next_one_with_the_answered_clients() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        clients = [ask(batcher, policy, times=4) for _ in range(3)]
        await policy.wait_for_call(1)
        clients += [ask(batcher, policy, times=3) for _ in range(5)]
        for call in range(2, 5):
            await asyncio.sleep(0)  # the new clients are in the queue before the call ends
            policy.gate.release()
            await policy.wait_for_call(call)
        policy.gate.release()
        await asyncio.gather(*clients)

    assert run(scenario, max_wait_s=FOREVER, clients=8) == [3, 8, 8, 8]


def test_two_clients_that_take_turns_come_to_share_their_calls() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        first = ask(batcher, policy, times=4)
        await policy.wait_for_call(1)
        second = ask(batcher, policy, times=3)
        await asyncio.sleep(0)
        policy.gate.release(4)
        await asyncio.gather(first, second)

    assert run(scenario, max_wait_s=FOREVER, clients=2) == [1, 2, 2, 2]


def test_without_a_wait_a_call_begins_with_the_requests_that_are_there() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        clients = [ask(batcher, policy)]
        await policy.wait_for_call(1)
        clients += [ask(batcher, policy), ask(batcher, policy)]
        await asyncio.sleep(0)
        policy.gate.release(2)
        await asyncio.gather(*clients)

    assert run(scenario, max_wait_s=0.0, clients=4) == [1, 2]


def test_clients_whose_requests_do_not_overlap_do_not_wait() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        policy.gate.release(2)
        await ask(batcher, policy)
        await ask(batcher, policy)

    assert run(scenario, max_wait_s=FOREVER, clients=2) == [1, 1]


def test_the_only_client_does_not_wait() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        policy.gate.release(3)
        await ask(batcher, policy, times=3)

    assert run(scenario, max_wait_s=FOREVER, clients=1) == [1, 1, 1]


def test_the_wait_for_clients_that_do_not_ask_ends() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        policy.gate.release(2)
        await asyncio.gather(ask(batcher, policy), ask(batcher, policy))
        await ask(batcher, policy)

    assert run(scenario, max_wait_s=0.05, clients=3) == [2, 1]


def test_only_requests_for_the_same_policy_and_steps_share_a_call() -> None:
    """While a newer checkpoint comes into service there are two policies."""
    old, new = GatedPolicy(), GatedPolicy()
    old.gate.release(2)
    new.gate.release(1)
    requests = [Request(old), Request(old), Request(new), Request(old, Options(num_steps=5)), Request(new)]

    async def main() -> None:
        batcher = Batcher(max_wait_s=0.0, expected=lambda: len(requests), metrics=ServerMetrics())
        await asyncio.gather(*(batcher.submit(request) for request in requests))  # type: ignore[arg-type]
        await batcher.close()

    asyncio.run(main())
    assert (old.sizes, new.sizes) == ([2, 1], [2])


def test_the_request_of_a_client_that_has_gone_is_not_computed() -> None:
    async def scenario(batcher: Batcher, policy: GatedPolicy) -> None:
        first = ask(batcher, policy)
        await policy.wait_for_call(1)
        second = ask(batcher, policy)
        await asyncio.sleep(0)
        assert len(batcher) == 1
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert len(batcher) == 0
        policy.gate.release()
        await first
        await asyncio.sleep(0.01)

    assert run(scenario, max_wait_s=0.0, clients=2) == [1]
