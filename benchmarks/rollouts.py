"""How fast episodes are played: rollout overhead, ALOHA's rendering, best-of-N's latency.

Run on an otherwise idle machine:  python benchmarks/rollouts.py
Prints a Markdown table; `--smoke` does the same in seconds with numbers that mean nothing.
"""

import argparse
import dataclasses
import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from acrlpd.config import RLTrainConfig, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.envs import Chunks, EnvPool, make_env, rollouts
from acrlpd.execution.open_loop import OpenLoop
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.policy import Policy, create_policy

CUBE = "cube-single-play-singletask-v0"
ALOHA = "gym_aloha/AlohaTransferCube-v0"


@dataclasses.dataclass(frozen=True)
class Row:
    what: str
    result: str
    wanted: str


def tiny_policy(spec: Any, best_of_n: int) -> tuple[Policy, RLTrainConfig]:
    """The quick start's policy with random weights."""
    config = get_config("quickstart")
    agent = create_agent(config, jax.random.key(0))
    dims = {"state": spec.features["observation.state"].shape[0], "actions": spec.action_dim}
    stats = {key: NormStats(np.zeros(dim), np.ones(dim)) for key, dim in dims.items()}
    return create_policy(
        acting_model(agent, average=config.acts_with_average), config, stats, best_of_n=best_of_n
    ), config


def steps_per_second(envs: EnvPool, policy: Any, replan_steps: int, episodes: int) -> float:
    execution = OpenLoop(replan_steps)
    for _ in rollouts(envs, policy, range(envs.num_envs), execution=execution):
        break  # compiled, and every process is awake
    start = time.perf_counter()
    steps = sum(r.length for r in rollouts(envs, policy, range(100, 100 + episodes), execution=execution))
    return steps / (time.perf_counter() - start)


def rollout_overhead(smoke: bool) -> list[Row]:
    """Every pair is measured in turns, so that a busy moment of the machine hits both."""
    rows = []
    limit, episodes, repeats = (20, 8, 1) if smoke else (100, 64, 3)
    for workers in (0, 1, os.cpu_count() or 1):
        with EnvPool(CUBE, 16, num_workers=workers, max_episode_steps=limit) as envs:
            chunk = np.random.default_rng(0).uniform(-1, 1, (1000, 5, 5)).astype(np.float32)

            def bare(
                observations: Any, prompts: Sequence[str], seeds: Sequence[int], chunk: np.ndarray = chunk
            ) -> Chunks:
                return Chunks(np.roll(chunk, seeds[0] % 1000, axis=0)[: len(prompts)])

            for n in (1, 8):
                policy, config = tiny_policy(envs.spec, n)
                k = config.qchunking.horizon_length
                pairs = [
                    (steps_per_second(envs, bare, k, episodes), steps_per_second(envs, policy, k, episodes))
                    for _ in range(repeats)
                ]
                alone = statistics.median(a for a, _ in pairs)
                acting = statistics.median(b for _, b in pairs)
                rows.append(
                    Row(
                        f"cube-single, 16 environments, {workers or 'no'} processes, tiny policy, best of {n}: "
                        "steps/s, and as a share of random chunks",
                        f"{acting:.0f} ({acting / alone:.2f} of {alone:.0f})",
                        "0.8" if n == 1 else "",
                    )
                )
    return rows


def stock_steps_per_second(smoke: bool) -> float:
    """gym-aloha as it comes, with all its rendering."""
    import gym_aloha  # noqa: F401 - registers
    import gymnasium

    env = gymnasium.make(ALOHA, obs_type="pixels_agent_pos", observation_width=224, observation_height=224)
    action = env.reset(seed=0)[0]["agent_pos"]
    return _rate(lambda: env.step(action), 2 if smoke else 30)


def aloha_speed(smoke: bool) -> list[Row]:
    """In this process alone, on one environment, as the stock number is."""
    env = make_env(ALOHA)
    env.reset(0)
    action = env.observe()["observation.state"]

    def observed_step() -> None:
        env.step(action)
        env.observe()

    every = _rate(observed_step, 5 if smoke else 100)
    chunk = 20

    def observed_chunk() -> None:
        for _ in range(chunk):
            env.step(action)
        env.observe()

    open_loop = chunk * _rate(observed_chunk, 1 if smoke else 10)
    env.close()
    stock = stock_steps_per_second(smoke)
    return [
        Row("ALOHA transfer, 3 cameras 224 x 224, stock environment: steps/s", f"{stock:.1f}", ""),
        Row("the same here, observed every step", f"{every:.1f} ({every / stock:.1f} x)", "5 x"),
        Row(f"the same here, observed every {chunk} steps", f"{open_loop:.0f} ({open_loop / stock:.0f} x)", ""),
    ]


def best_of_n_latency(smoke: bool) -> list[Row]:
    env = make_env(CUBE)
    env.reset(0)
    observation = {name: value[None] for name, value in env.observe().items()}
    policies = {n: tiny_policy(env.spec, n)[0] for n in (1, 4, 16, 32)}
    times: dict[int, list[float]] = {n: [] for n in policies}
    for i in range(3 if smoke else 200):
        for n, policy in policies.items():
            start = time.perf_counter()
            policy(observation, [env.prompt], [i])
            times[n].append(time.perf_counter() - start)
    medians = {n: statistics.median(values[1:]) for n, values in times.items()}
    return [
        Row(
            f"tiny policy, one observation, best of {n}: ms",
            f"{1000 * median:.2f} ({median / medians[1]:.2f} x)",
            "2 x" if n == 16 else "",
        )
        for n, median in medians.items()
    ]


def _rate(function: Callable[[], Any], count: int) -> float:
    function()
    start = time.perf_counter()
    for _ in range(count):
        function()
    return count / (time.perf_counter() - start)


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes, no meaning")
    smoke = parser.parse_args().smoke
    rows = rollout_overhead(smoke) + aloha_speed(smoke) + best_of_n_latency(smoke)
    print(f"# Rollouts\n\n{datetime.date.today()}, commit {_commit()}, {os.cpu_count()} cores, ", end="")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}\n")
    print("| what | measured | wanted |\n|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.result} | {row.wanted} |")


if __name__ == "__main__":
    main()
