"""The server answers each random or mutated message, and serves other clients meanwhile."""

import asyncio
import random
from typing import Any

import numpy as np
from serving_helpers import RunningServer, state_observation
from websockets.asyncio.client import ClientConnection, connect

from acrlpd.serving.message_format import packb, unpackb
from acrlpd.serving.serving_policy import ServingPolicy

NUM_MESSAGES = 1_600  # the soak sends more
NUM_CLIENTS = 8

ODD_VALUES = [
    None,
    True,
    -1,
    2**63,
    1e300,
    float("nan"),
    "",
    "x" * 1000,
    b"\x00",
    [],
    [[1], [2, 3]],
    {},
    {"a": {"b": [1]}},
    np.zeros(0),
    np.zeros((3, 1)),
    np.full(3, np.inf),
    np.array(3),
    np.zeros(3, np.int8),
    np.zeros(3, bool),
    np.float16(2),
]
KEYS = ["state", "images", "prompt", "best_of_n", "num_steps", "seed", "return_candidates", "actions", "x"]


def random_message(rng: random.Random) -> bytes | str:
    """A good message that was damaged, or random bytes."""
    message: dict[str, Any] = state_observation(rng.randrange(100), best_of_n=2, num_steps=1) | {"seed": 1}
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        for _ in range(rng.randrange(1, 4)):
            message[rng.choice(KEYS)] = rng.choice(ODD_VALUES)
        return packb({key: value for key, value in message.items() if rng.random() > 0.1})
    data = bytearray(packb(message))
    if kind == 2:
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 3:
        del data[rng.randrange(len(data)) :]
    else:
        place = rng.randrange(len(data))
        data[place : place + rng.randrange(4)] = rng.randbytes(rng.randrange(8))
    return bytes(data) if rng.random() > 0.02 else data.hex()


async def hostile_client(
    url: str, rng: random.Random, count: int, answers: dict[str, int], honest: "HonestClient"
) -> None:
    connection: ClientConnection | None = None
    for number in range(count):
        if number % max(count // 12, 1) == 0:
            await honest.be_served()
        if connection is None:
            connection = await connect(url, compression=None)
            await connection.recv()
        await connection.send(random_message(rng))
        reply = await asyncio.wait_for(connection.recv(), 120)
        if isinstance(reply, str):
            answers["refused"] += 1
            assert reply.startswith("bad request: "), reply
            connection.transport.abort()  # the server closes it anyway
            connection = None
        else:
            answers["accepted"] += 1
            assert np.isfinite(unpackb(reply)["actions"]).all()
    if connection is not None:
        await connection.close()


class HonestClient:
    """Asks the same question again and again, and must always get the same answer."""

    def __init__(self, expected: np.ndarray) -> None:
        self.expected = expected
        self.num_replies = 0

    async def ask_until(self, stop: asyncio.Event, url: str) -> None:
        async with connect(url, compression=None) as connection:
            await connection.recv()
            while not stop.is_set():
                await connection.send(packb(state_observation(7) | {"seed": 7}))
                reply = await connection.recv()
                assert isinstance(reply, bytes)
                np.testing.assert_allclose(unpackb(reply)["actions"], self.expected, atol=1e-5)
                self.num_replies += 1
                await asyncio.sleep(0.02)

    async def be_served(self) -> None:
        """Waits for another reply to this client. Hostile clients wait here, so their attack takes many replies."""
        before = self.num_replies
        async with asyncio.timeout(120):
            while self.num_replies == before:
                await asyncio.sleep(0.01)


def attack(policy: ServingPolicy, num_messages: int, seed: int) -> None:
    """Sends so many messages from several clients, beside a client that is honest; every one has to be answered."""
    [expected] = policy.infer([policy.prepare(state_observation(7) | {"seed": 7})])
    assert isinstance(expected, dict)
    answers = {"accepted": 0, "refused": 0}

    async def all_clients(url: str) -> int:
        stop, honest = asyncio.Event(), HonestClient(expected["actions"])
        asking = asyncio.create_task(honest.ask_until(stop, url))
        share = num_messages // NUM_CLIENTS
        rngs = [random.Random(f"{seed} {number}") for number in range(NUM_CLIENTS)]
        try:
            await asyncio.gather(*(hostile_client(url, rng, share, answers, honest) for rng in rngs))
        finally:
            stop.set()
            await asking  # whose error would be the cause of all others
        return honest.num_replies

    with RunningServer(policy, max_wait_ms=0.0) as server:
        undisturbed = asyncio.run(all_clients(server.url))
        values = server.scrape()
        assert server.get("/healthz") == (200, "OK\n")
    assert sum(answers.values()) == num_messages
    assert answers["refused"] > num_messages / 10 and answers["accepted"] > num_messages / 100 and undisturbed > 10
    assert values['acrlpd_requests_total{result="error"}'] == values['acrlpd_requests_total{result="timeout"}'] == 0
    assert values['acrlpd_requests_total{result="bad_request"}'] == answers["refused"]


def test_hostile_messages_never_take_the_server_down(policy: ServingPolicy) -> None:
    attack(policy, NUM_MESSAGES, seed=0)
