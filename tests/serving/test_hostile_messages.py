"""A message that is made to freeze the server costs the server, and the other clients, no more than a good message."""

import asyncio
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pytest
from hostile_messages import HOSTILE, honest_message
from serving_helpers import RunningServer, state_observation
from websockets.asyncio.client import connect

from acrlpd.serving.message_format import MessageError, packb, unpackb
from acrlpd.serving.requests import RequestError
from acrlpd.serving.serving_policy import ServingPolicy

NUM_ATTACKERS = 4
NUM_ROUNDS = 3
MOST_TRIES = 25


@pytest.mark.parametrize("name", HOSTILE)
def test_each_is_refused_at_the_cost_of_a_good_message(policy: ServingPolicy, name: str) -> None:
    """The cost is time of the processor, the least of many tries: other processes can only make a try dearer."""
    hostile = HOSTILE[name]()
    honest = honest_message(state_observation(), len(hostile))

    def refuse() -> None:
        with pytest.raises((RequestError, MessageError)) as refused:
            policy.prepare(unpackb(hostile))
        assert len(str(refused.value)) < 2000

    allowed = min(processor_seconds(lambda: policy.prepare(unpackb(honest))) for _ in range(3))
    limit = 5 * (allowed + 0.001)  # a thousand elements are read in less than a millisecond
    assert any(processor_seconds(refuse) < limit for _ in range(MOST_TRIES))
    tracemalloc.start()
    refuse()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(hostile) + 2**20


def processor_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_an_honest_client_waits_no_longer_than_beside_honest_clients(policy: ServingPolicy) -> None:
    """Attackers send every hostile message. In their place honest clients send good messages of the same sizes.

    Both take turns, so that both have the same share of a busy machine. More turns decide where a few do not.
    """
    hostile = [make() for make in HOSTILE.values()]
    honest = [honest_message(state_observation(), len(message)) for message in hostile]
    ratios: list[float] = []
    with RunningServer(policy, max_clients_per_address=NUM_ATTACKERS + 2) as server:
        asyncio.run(waiting_time(server.url, honest))  # warms everything up
        while len(ratios) < NUM_ROUNDS or (statistics.median(ratios) >= 5 and len(ratios) < MOST_TRIES):
            beside_honest = asyncio.run(waiting_time(server.url, honest))
            ratios.append(asyncio.run(waiting_time(server.url, hostile)) / beside_honest)
        values = server.scrape()
    assert values['acrlpd_requests_total{result="bad_request"}'] == len(ratios) * len(hostile)
    assert values['acrlpd_requests_total{result="error"}'] == values['acrlpd_requests_total{result="timeout"}'] == 0
    assert statistics.median(ratios) < 5, ratios


async def waiting_time(url: str, messages: Sequence[bytes]) -> float:
    """How long an honest client waits that asks at a random moment while other clients send these messages."""
    stop = asyncio.Event()
    client = asyncio.create_task(latencies(url, stop))
    shuffled = iter(random.Random(0).sample(messages, len(messages)))
    await asyncio.gather(*(send_all(url, shuffled) for _ in range(NUM_ATTACKERS)))
    stop.set()
    seconds = await client
    # A long wait counts by its length, because more moments fall into it.
    return sum(s**2 for s in seconds) / sum(seconds)


async def send_all(url: str, messages: Iterator[bytes]) -> None:
    for message in messages:
        async with connect(url, compression=None) as connection:
            await connection.recv()
            await connection.send(message)
            await asyncio.wait_for(connection.recv(), 120)


async def latencies(url: str, stop: asyncio.Event) -> list[float]:
    seconds = []
    message = packb(state_observation())
    async with connect(url, compression=None) as connection:
        await connection.recv()
        while not stop.is_set():
            start = time.perf_counter()
            await connection.send(message)
            assert isinstance(await asyncio.wait_for(connection.recv(), 120), bytes)
            seconds.append(time.perf_counter() - start)
    return seconds
