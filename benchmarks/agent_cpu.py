"""Ratios of the agent's update on a CPU: what the algorithm costs, whatever the hardware.

    python benchmarks/agent_cpu.py            # three minutes on two idle cores, prints a Markdown table
    python benchmarks/agent_cpu.py --smoke    # a check of the script

FLOP rows count matrix products of the traced full-size step, so they are exact and need no GPU.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import jax
import jax.numpy as jnp

import agent_gpu as bench
from acrlpd.agents import train_step
from acrlpd.agents.algorithm import prepare
from acrlpd.config import get_config
from acrlpd.config.create_agent import create_agent

Row = tuple[str, str, str]  # what, measured, wanted


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """2 m k n of every matrix product, loops multiplied out."""

    def count(jaxpr: Any) -> float:
        total = 0.0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contract, _), _ = equation.params["dimension_numbers"]
                lhs = equation.invars[0].aval.shape
                out = equation.outvars[0].aval.shape
                total += 2.0 * math.prod(out) * math.prod(lhs[axis] for axis in contract)
                continue
            inner = 0.0
            for value in equation.params.values():
                for item in value if isinstance(value, (tuple, list)) else [value]:
                    jaxpr_of = getattr(item, "jaxpr", item)
                    inner += count(jaxpr_of) if hasattr(jaxpr_of, "eqns") else 0.0
            total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        return total

    return count(jax.make_jaxpr(function)(*args).jaxpr)


def flop_row(*, frozen: bool, remat: str) -> Row:
    """The joint step of the full-size pi0 against its necessary parts."""
    config, b = bench.pi0_config(tiny=False, frozen=frozen, remat=remat), 2
    agent = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, bench.make_batch(config, b)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    noise = jax.ShapeDtypeStruct((b, 4, config.model.action_horizon, config.model.action_dim), jnp.float32)

    def bc_gradient(agent: Any, batch: Any, rng: Any) -> Any:
        (prepared, draws), _ = prepare(agent, batch, rng)

        def loss(params: Any) -> jax.Array:
            policy = agent.replace(policy_params=params).policy()
            context = policy.encode(prepared.observations, features=False)
            losses = policy.flow_matching_loss(context, prepared.actions, draws.flow_noise, draws.flow_time)
            return jnp.mean(losses)

        return jax.grad(loss)(agent.policy_params)

    def encode(agent: Any, observation: Any) -> Any:
        policy = agent.policy()
        return policy.encode(policy.preprocess(None, observation, train=False))

    context = jax.eval_shape(encode, agent, batch.next_observations)
    joint = count_flops(lambda agent, batch, rng: agent.train_step(batch, rng), agent, batch, key)
    parts = count_flops(bc_gradient, agent, batch, key) + count_flops(encode, agent, batch.next_observations)
    parts += 2 * count_flops(lambda agent, c, n: agent.policy().denoise(c, n, num_steps=10), agent, context, noise)
    kind = "frozen backbone" if frozen else "full fine-tune"
    return (
        f"TFLOP per sample of the joint step, {kind}, remat {remat}",
        f"{joint / b / 1e12:.2f}, {joint / parts:.3f} x its parts",
        "at most 1.15 x",
    )


def backup_row(repeats: int, *, features: bool) -> Row:
    """The quick start's update with either backup, one after the other in turns, so that both meet the same load."""
    config = get_config("quickstart")
    config = dataclasses.replace(config, critic=dataclasses.replace(config.critic, use_pi0_features=features))
    batch = bench.make_batch(config, config.batch_size)
    calls = [
        bench.repeat_update(train_step, bench.random_agent(each), batch, jax.random.key(0))
        for each in (config, bench.with_implicit_value(config))
    ]
    turns = [[bench.time_calls(call, repeats) for call in calls] for _ in range(repeats)]
    best_of_n, implicit = (1e3 * statistics.median(seconds) for seconds in zip(*turns, strict=True))
    return (
        f"quick start's update, best_of_n and implicit_value, critics {'with' if features else 'without'} features",
        f"{best_of_n:.1f} ms and {implicit:.1f} ms, {implicit / best_of_n:.2f} x",
        "below 1 x",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    repeats = 1 if args.smoke else 5
    rows = [
        flop_row(frozen=False, remat="full"),
        flop_row(frozen=False, remat="dots"),
        flop_row(frozen=True, remat="full"),
    ]
    parts = bench.parts_row(bench.pi0_config(tiny=True, frozen=False), 2 if args.smoke else 8, repeats)
    rows.append(("tiny pi0, joint step against its parts", f"{parts['time']}, {parts['rate']}", "at most 1.15 x"))
    ensemble = bench.ensemble_row(32, 2048, repeats)
    rows.append(("10 critics against 1", f"{ensemble['time']}, {ensemble['rate']}", "2.5 x is meant for a GPU"))
    state = bench.state_row("float32", 1 if args.smoke else 3, repeats, tiny=args.smoke)
    rows.append(("state-space update, the paper's settings", state["rate"], "0.9 updates/s (the reference, 2 cores)"))
    rows += [backup_row(repeats, features=features) for features in (True, False)]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, ", end="")
    print(f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}\n")
    print("| what | measured | wanted |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
