"""What serving costs: overhead over the bare policy call, batching of 8 clients, best-of-16 at full size.

Run on an otherwise idle machine:  python benchmarks/serving.py [--full]
`--full` adds the pi0 of the preset `aloha_sim` and the full-size one, with random weights, and needs one GPU. Prints a
Markdown table; `--smoke` does the same in seconds with numbers that mean nothing. Clients are in a process of their
own, on the loopback interface; it is one process for all eight, because on a robot they would not take the server's
processors.
"""

import argparse
import asyncio
import concurrent.futures
import dataclasses
import datetime
import multiprocessing
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import connect

from acrlpd.config import DataConfig, MLPCritics, QChunkingConfig, RepackConfig, RLTrainConfig, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.policy import create_policy
from acrlpd.serving.message_format import packb, unpackb
from acrlpd.serving.server import PolicyServer, ServerOptions
from acrlpd.serving.serving_policy import ServingPolicy, create_serving_policy

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclasses.dataclass(frozen=True)
class Row:
    what: str
    result: str
    wanted: str


def three_camera_config(model: Pi0Config) -> RLTrainConfig:
    data = DataConfig(tokenizer="byte", default_prompt="go", repack=RepackConfig(*CAMERAS))
    return RLTrainConfig(
        name="serving", model=model, data=data, qchunking=QChunkingConfig(horizon_length=10, action_dim=14)
    )


def small_config() -> RLTrainConfig:
    """A policy that is cheap enough to show the server's share. It is sent images and does not look at them."""
    return RLTrainConfig(
        name="small",
        model=StateFlowPolicyConfig(state_dim=14, action_dim=14, action_horizon=10, hidden_dims=(64,)),
        critic=MLPCritics(num_critics=2, hidden_dims=(64,), use_pi0_features=False),
        qchunking=QChunkingConfig(horizon_length=10, action_dim=14),
    )


def make_policy(
    config: RLTrainConfig, state_dim: int, action_dim: int, best_of_n: int, **options: Any
) -> ServingPolicy:
    """Random weights in the shapes of the config, in the precision that is served."""
    agent = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))
    model = acting_model(agent, average=config.acts_with_average)
    key = iter(range(1_000_000))

    def weights(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(
            lambda x: 0.02 * jax.random.normal(jax.random.key(next(key)), x.shape, jnp.dtype(dtype)), tree
        )

    params, critics = weights(model.params, config.model.dtype), weights(model.critics, "float32")
    model = model.replace(params=params, critics=critics)
    dims = {"state": state_dim, "actions": action_dim}
    stats = {key: NormStats(np.zeros(dim), np.ones(dim)) for key, dim in dims.items()}
    policy = create_serving_policy(create_policy(model, config, stats, best_of_n=best_of_n), **options)
    policy.warm_up()
    return policy


@contextmanager
def serving(policy: ServingPolicy, **options: Any) -> Iterator[int]:
    """A server in a thread of this process; its port."""
    started, stop = threading.Event(), asyncio.Event()
    state: dict[str, Any] = {}

    async def run() -> None:
        server = PolicyServer(policy, ServerOptions(port=0, **options))
        await server.start()
        state.update(port=server.port, loop=asyncio.get_running_loop())
        started.set()
        await stop.wait()
        await server.drain()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    started.wait()
    try:
        yield state["port"]
    finally:  # an error of a client must not leave a thread behind that Python waits for
        state["loop"].call_soon_threadsafe(stop.set)
        thread.join()


def drive(port: int, observation: dict[str, Any], count: int) -> list[float]:
    """Round trips of one client, in seconds, one after the other."""
    message, times = packb(observation), []
    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
        connection.recv()
        for _ in range(count + 3):
            start = time.perf_counter()
            connection.send(message)
            reply = connection.recv()
            times.append(time.perf_counter() - start)
            if isinstance(reply, str):
                raise RuntimeError(reply)
            unpackb(reply)
    return times[3:]


def drive_eight(port: int, observation: dict[str, Any], count: int) -> float:
    """Requests per second of 8 clients, each of which sends its next request when it has its answer."""
    message = packb(observation)

    async def client(all_connected: asyncio.Barrier) -> float:
        async with connect_async(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
            await connection.recv()
            await all_connected.wait()
            start = time.perf_counter()
            for _ in range(count):
                await connection.send(message)
                reply = await connection.recv()
                if isinstance(reply, str):
                    raise RuntimeError(reply)
            return time.perf_counter() - start

    async def clients() -> float:
        all_connected = asyncio.Barrier(8)
        return max(await asyncio.gather(*(client(all_connected) for _ in range(8))))

    return 8 * count / asyncio.run(clients())


def bare_calls(policy: ServingPolicy, observation: dict[str, Any], count: int) -> list[float]:
    """The same work without a server: transforms, sampling, outputs."""
    times = []
    for _ in range(count + 3):
        start = time.perf_counter()
        policy.infer([policy.prepare(observation)])
        times.append(time.perf_counter() - start)
    return times[3:]


def camera_observation(cameras: Sequence[str] = CAMERAS, size: tuple[int, int] = (224, 224)) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    images = {camera: rng.integers(0, 256, (*size, 3), np.uint8) for camera in cameras}
    return {"state": np.zeros(14, np.float32), "images": images, "prompt": "go"}


def overhead(pool: concurrent.futures.Executor, count: int) -> Row:
    """Server and client take turns with bare calls, so that a slow moment hits both."""
    policy = make_policy(small_config(), 14, 14, best_of_n=1, num_steps=(1,))
    served: list[float] = []
    bare: list[float] = []
    with serving(policy) as port:
        for _ in range(5):
            served += pool.submit(drive, port, camera_observation(), count // 5).result()
            bare += bare_calls(policy, camera_observation(), count // 5)
    difference = 1000 * (statistics.median(served) - statistics.median(bare))
    return Row(
        "server overhead, 3 images of 224, median",
        f"{difference:.2f} ms (served {1000 * statistics.median(served):.2f}, bare "
        f"{1000 * statistics.median(bare):.2f}; p95 {1000 * np.quantile(served, 0.95):.2f} and "
        f"{1000 * np.quantile(bare, 0.95):.2f})",
        "< 3 ms",
    )


def throughput(pool: concurrent.futures.Executor, policy: ServingPolicy, observation: Any, count: int) -> float:
    with serving(policy) as port:
        return pool.submit(drive_eight, port, observation, count).result()


def eight_clients(
    pool: concurrent.futures.Executor, what: str, policy: ServingPolicy, observation: Any, count: int, wanted: str
) -> Row:
    one_by_one = throughput(pool, dataclasses.replace(policy, max_batch_size=1), observation, count)
    batched = throughput(pool, policy, observation, count)
    return Row(
        f"8 clients, {what}: batched against one by one",
        f"{batched / one_by_one:.2f} x ({batched:.0f} and {one_by_one:.0f} requests/s)",
        wanted,
    )


def state_space(pool: concurrent.futures.Executor, count: int) -> list[Row]:
    policy = make_policy(small_config(), 14, 14, best_of_n=16, num_steps=(10,), max_batch_size=8)
    observation = {"state": np.zeros(14, np.float32)}
    return [eight_clients(pool, "state-space policy, best of 16", policy, observation, count, ">= 3 x, 2 x on a CPU")]


def aloha_sim(pool: concurrent.futures.Executor, count: int) -> list[Row]:
    """A pi0 of 17 M parameters that sees three small pictures: what the preset of that name trains."""
    config = get_config("aloha_sim")
    rows = []
    for best_of_n in (1, 16):
        policy = make_policy(config, 14, 14, best_of_n=best_of_n, num_steps=(10,), max_batch_size=8)
        observation = camera_observation([path[-1] for path in policy.spec.cameras], config.env.image_size)
        what = f"policy of `aloha_sim`, best of {best_of_n}"
        rows.append(eight_clients(pool, what, policy, observation, count, ">= 3 x"))
    return rows


def full_size(pool: concurrent.futures.Executor, count: int) -> list[Row]:
    config = three_camera_config(Pi0Config())
    rows = []
    for best_of_n in (1, 16):
        policy = make_policy(config, 14, 14, best_of_n=best_of_n, num_steps=(10,), max_batch_size=8)
        with serving(policy) as port:
            times = pool.submit(drive, port, camera_observation(), count).result()
        what = f"full-size pi0, 3 cameras, best of {best_of_n}, 10 steps"
        result = f"{1000 * statistics.median(times):.1f} ms median, {1000 * np.quantile(times, 0.95):.1f} ms p95"
        rows.append(Row(f"{what}, end to end", result, "< 60 ms on an H200"))
        rows.append(eight_clients(pool, what, policy, camera_observation(), count // 4, ">= 3 x"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    count = 20 if args.smoke else 200
    # Spawned, not forked: clients must not share this process' JAX.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        rows = [overhead(pool, count), *state_space(pool, count)]
        if args.full:
            rows += aloha_sim(pool, count) + full_size(pool, count)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = jax.devices()[0].device_kind
    print(f"# Serving, {datetime.date.today()}, commit {commit}{' (smoke)' if args.smoke else ''}\n")
    print(f"{device}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}\n")
    print("| what | result | wanted |\n|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.result} | {row.wanted} |")


if __name__ == "__main__":
    main()
