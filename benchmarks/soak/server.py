"""64 clients ask a server for an hour, at first all honest, then some of them abusive; nothing may grow.

Every client has an address of its own (127.0.0.x) and a pace of its own. Honest clients check every answer, and
connect again now and then. Abusive clients send damaged and oversized messages, begin what they do not end, stay idle,
and vanish. The begin and the end of each half are compared: memory, file handles, and the processor time of the server
for each answer, which other processes of the machine do not change as they change latencies.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from harness import Trial, ViolationError, check, soak_trial
from hostile_messages import HOSTILE
from serve_process import ServeProcess
from serving_helpers import state_observation
from small_checkpoints import make_agent, save_run, state_config
from test_server_fuzz import random_message
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from acrlpd.serving.message_format import packb, unpackb

NUM_CLIENTS, NUM_ABUSIVE = 64, 8
PLACES = 96  # of the server: abusive clients begin new connections before the server has noticed that old ones are gone
PACE_S = 4.0  # between two requests of a client, on average
SAMPLE_S = 5.0
IDLE_S = 30.0  # until the server closes an idle connection
# Growth of the server's memory that counts as noise of the allocator.
MEMORY_SLACK = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Sample:
    """The server at one moment."""

    memory: int  # resident bytes
    handles: int
    processor_s: float
    answers: int  # to honest clients


def sample(pid: int, answers: int = 0) -> Sample:
    process = pathlib.Path(f"/proc/{pid}")
    [kib] = (line.split()[1] for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    processor_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return Sample(1024 * int(kib), sum(1 for _ in (process / "fd").iterdir()), processor_s, answers)


@dataclasses.dataclass
class Half:
    """What was seen in one half of the trial."""

    samples: list[Sample] = dataclasses.field(default_factory=list)
    latencies: list[float] = dataclasses.field(default_factory=list)  # of honest clients, in seconds, in order
    attacks: int = 0

    def _begin_and_end(self, values: Sequence[Any], summary: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
        """A number for the second and for the last quarter of the half; the first quarter warms up."""
        quarter = len(values) // 4
        return summary(values[quarter : 2 * quarter]), summary(values[-quarter:])

    @property
    def memory(self) -> tuple[float, float]:
        """Least values: a large message takes memory while it is read, a leak keeps it."""
        return self._begin_and_end([one.memory for one in self.samples], min)

    @property
    def handles(self) -> tuple[float, float]:
        return self._begin_and_end([one.handles for one in self.samples], statistics.median)

    @property
    def processor_s(self) -> tuple[float, float]:
        """For each answer."""
        return self._begin_and_end(
            self.samples,
            lambda some: (some[-1].processor_s - some[0].processor_s) / (some[-1].answers - some[0].answers),
        )

    @property
    def latency(self) -> tuple[float, float]:
        return self._begin_and_end(self.latencies, statistics.median)


class Clients:
    """All clients of the trial, in one event loop."""

    def __init__(self, trial: Trial, port: int) -> None:
        self._rng = trial.rng
        self.port = port
        self.half = Half()
        self._expected: dict[int, np.ndarray] = {}  # by seed: equal requests get equal answers

    @contextlib.asynccontextmanager
    async def connection(self, number: int) -> AsyncIterator[ClientConnection]:
        """A connection of a client that has taken the metadata."""
        address = (f"127.0.0.{number + 2}", 0)
        url = f"ws://127.0.0.1:{self.port}"
        async with connect(url, compression=None, max_size=None, local_addr=address, open_timeout=60) as connection:
            await connection.recv()
            yield connection

    async def honest(self, number: int) -> None:
        """Asks again and again; an answer that is wrong, missing or late by a minute is a violation."""
        rng = random.Random(self._rng.random())
        while True:
            async with self.connection(number) as connection:
                for _ in range(rng.randrange(20, 200)):
                    await asyncio.sleep(rng.uniform(0.5, 1.5) * PACE_S)
                    await self._ask(connection, seed=rng.randrange(20))

    async def _ask(self, connection: ClientConnection, seed: int) -> None:
        start = time.perf_counter()
        await connection.send(packb(state_observation(seed) | {"seed": seed}))
        reply = await asyncio.wait_for(connection.recv(), 60)
        self.half.latencies.append(time.perf_counter() - start)
        check(isinstance(reply, bytes), f"an honest client was told {reply!r}")
        actions = unpackb(reply)["actions"]
        expected = self._expected.setdefault(seed, actions)
        check(np.allclose(actions, expected, atol=1e-5), f"other actions for the request with seed {seed}")

    async def abusive(self, number: int) -> None:
        rng = random.Random(self._rng.random())
        attacks: list[Callable[[int, random.Random], Awaitable[None]]] = [
            *[self._send_damaged] * 6,
            *[self._send_hostile] * 4,
            self._begin_a_handshake,
            self._begin_a_message,
            self._vanish,
            self._stay_idle,
        ]
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * PACE_S / 4)
            # The server may close the connection of an abusive client at any time.
            with contextlib.suppress(ConnectionClosed, ConnectionError):
                await rng.choice(attacks)(number, rng)
            self.half.attacks += 1

    async def _send(self, number: int, message: bytes | str) -> None:
        async with self.connection(number) as connection:
            await connection.send(message)
            reply = await asyncio.wait_for(connection.recv(), 60)
            is_refusal = isinstance(reply, str) and reply.startswith("bad request: ")
            check(is_refusal or isinstance(reply, bytes), f"an attack was answered with {reply!r}")
            connection.transport.abort()

    async def _send_damaged(self, number: int, rng: random.Random) -> None:
        await self._send(number, random_message(rng))

    async def _send_hostile(self, number: int, rng: random.Random) -> None:
        """A message that is made to cost the server more than its sender."""
        await self._send(number, HOSTILE[rng.choice(list(HOSTILE))]())

    async def _begin_a_handshake(self, number: int, rng: random.Random) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(f"127.0.0.{number + 2}", 0))
        writer.write(b"GET / HTTP/1.1\r\nHost: robot\r\nUpgrade: web"[: rng.randrange(1, 40)])
        await asyncio.sleep(rng.uniform(0, IDLE_S / 4))
        writer.transport.abort()

    async def _begin_a_message(self, number: int, rng: random.Random) -> None:
        async with self.connection(number) as connection:
            connection.transport.write(b"\x82\xff" + (2**24).to_bytes(8, "big") + bytes(rng.randrange(10_000)))
            await asyncio.sleep(rng.uniform(0, IDLE_S / 4))
            connection.transport.abort()

    async def _vanish(self, number: int, rng: random.Random) -> None:
        async with self.connection(number) as connection:
            await connection.send(packb(state_observation(1)))
            connection.transport.abort()

    async def _stay_idle(self, number: int, rng: random.Random) -> None:
        async with self.connection(number) as connection:
            await asyncio.wait_for(connection.wait_closed(), 10 * IDLE_S)


async def drive(trial: Trial, clients: Clients, pid: int, num_abusive: int) -> Half:
    """Half of the trial."""
    clients.half = half = Half()
    tasks = [asyncio.create_task(clients.abusive(number)) for number in range(num_abusive)]
    tasks += [asyncio.create_task(clients.honest(number)) for number in range(num_abusive, NUM_CLIENTS)]
    end, said = time.monotonic() + trial.options.duration / 2, 0.0
    while time.monotonic() < end:
        done, _ = await asyncio.wait(tasks, timeout=SAMPLE_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            raise ViolationError(f"a client ended: {task.exception()!r}") from task.exception()
        half.samples.append(sample(pid, len(half.latencies)))
        if time.monotonic() - said > 60:
            said, now = time.monotonic(), half.samples[-1]
            recent = statistics.median(half.latencies[-500:] or [0])
            counts = f"{len(half.latencies)} answers, {half.attacks} attacks, median {1000 * recent:.1f} ms"
            trial.say(f"{counts}, {now.memory / 2**20:.0f} MiB, {now.handles} handles")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return half


def judge(trial: Trial, half: Half, who: str) -> None:
    memory, handles, cost, latency = half.memory, half.handles, half.processor_s, half.latency
    grown = memory[1] > memory[0] + MEMORY_SLACK
    check(not grown, f"{who}: memory grew from {memory[0]:.0f} to {memory[1]:.0f} bytes")
    check(handles[1] <= handles[0] + 2, f"{who}: file handles grew from {handles[0]} to {handles[1]}")
    check(cost[1] <= 2 * cost[0], f"{who}: an answer took {cost[0]:.4f} s of the processor, then {cost[1]:.4f} s")
    p99 = 1000 * np.quantile(half.latencies, 0.99)
    most = max(one.memory for one in half.samples) / 2**20
    attacks = f", {half.attacks:,} attacks" if half.attacks else ""
    trial.held(
        f"`acrlpd serve` with {NUM_CLIENTS} clients, {who}",
        f"{trial.options.duration / 2:.0f} s, {len(half.latencies):,} honest requests{attacks}",
        f"memory {memory[0] / 2**20:.0f} to {memory[1] / 2**20:.0f} MiB (at most {most:.0f}), "
        f"file handles {handles[0]:.0f} to {handles[1]:.0f}, "
        f"processor time per answer {1000 * cost[0]:.1f} to {1000 * cost[1]:.1f} ms, "
        f"median latency {1000 * latency[0]:.1f} to {1000 * latency[1]:.1f} ms (99 %: {p99:.0f} ms), "
        "every honest answer right",
    )


def main() -> None:
    with soak_trial("server", __doc__, duration=3600.0) as trial:
        check(trial.options.duration >= 120, "--duration must be at least 120 s")
        config = state_config()
        run = save_run(trial.directory / "run", config, {1: make_agent(config)})
        options = ("--idle_timeout_s", str(IDLE_S), "--max_clients", str(PLACES))
        with ServeProcess(trial.directory / "xla_cache", run, *options) as server:
            pid = server.pid
            alone = sample(pid)
            clients = Clients(trial, server.port)
            judge(trial, asyncio.run(drive(trial, clients, pid, 0)), "all honest")
            judge(trial, asyncio.run(drive(trial, clients, pid, NUM_ABUSIVE)), f"{NUM_ABUSIVE} of them abusive")
            deadline = time.monotonic() + 60
            while (handles := sample(pid).handles) > alone.handles + 2:
                check(time.monotonic() < deadline, f"{handles} file handles without clients, {alone.handles} before")
                time.sleep(0.5)
        check("Traceback" not in server.said, f"the server logged a traceback:\n{server.said[-3000:]}")


if __name__ == "__main__":
    main()
