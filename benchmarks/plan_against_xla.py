"""How good the plan is: its peak memory against XLA's own analysis, its step time against the clock.

    python benchmarks/plan_against_xla.py             # small models, any machine
    python benchmarks/plan_against_xla.py --full      # full-size pi0, one 140 GB accelerator
    python benchmarks/plan_against_xla.py --full --time

Prints a Markdown table. Without --time the compiler does not tune kernels, which saves minutes.
"""

import argparse
import datetime
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acrlpd.config import RLTrainConfig

FULL = {
    "pi0, batch 32, N 4": {},
    "batch 64": {"batch_size": 64},
    "remat dots": {"model.remat_policy": "dots"},
    "remat none, batch 8": {"model.remat_policy": "none", "batch_size": 8},
    "2 micro-batches": {"training.gradient_accumulation_steps": 2},
    "N 32 parallel": {"acrlpd.num_action_samples": 32, "acrlpd.best_of_n.strategy": "parallel"},
    "LoRA": {"model.paligemma_variant": "gemma_2b_lora", "model.action_expert_variant": "gemma_300m_lora"},
    "frozen backbone": {"freeze_pi0_backbone": True},
    "frozen backbone, batch 16": {"freeze_pi0_backbone": True, "batch_size": 16},
    "pi0.5, batch 16": {"model.pi05": True, "batch_size": 16},
    "policy_gradient, batch 8": {"improvement": "policy_gradient", "batch_size": 8},
}
SMALL = {
    "tiny pi0, batch 32": {},
    "batch 64": {"batch_size": 64},
    "remat none": {"model.remat_policy": "none"},
    "frozen backbone": {"freeze_pi0_backbone": True},
}
TIMED = ("pi0, batch 32, N 4", "frozen backbone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    if not args.time:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    import jax

    cases = FULL if args.full else SMALL
    if args.time:
        cases = {name: cases[name] for name in TIMED if name in cases}
    cases = {name: changes for name, changes in cases.items() if args.only in name}
    device = jax.devices()[0]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{device.device_kind}, jax {jax.__version__}, {datetime.date.today()}, commit {commit or 'unknown'}\n")
    print("| case | XLA peak GiB | plan GiB | ratio | state | temp | plan's temp | compile s | step ms | plan ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, changes in cases.items():
        print(f"| {name} | " + " | ".join(measure(config_of(args.full, changes), args.time)) + " |")
        sys.stdout.flush()


def config_of(full: bool, changes: dict[str, Any]) -> "RLTrainConfig":
    from acrlpd.config import apply_config_overrides, get_config

    base = {"batch_size": 32, "training.gradient_accumulation_steps": 1, "acrlpd.num_action_samples": 4}
    if full:
        base |= {
            "freeze_pi0_backbone": False,
            "model.action_horizon": 50,
            "critic.num_critics": 10,
            "critic.hidden_dims": [512, 512, 512],
        }
    else:
        base |= {"model.image_resolution": [112, 112], "acrlpd.sampling_steps": 4}
    config = get_config("aloha_seeds" if full else "debug")
    return apply_config_overrides(apply_config_overrides(config, base), changes)


def measure(config: "RLTrainConfig", timed: bool) -> list[str]:
    import jax

    from acrlpd.agents import train_step
    from acrlpd.config.create_agent import create_agent
    from acrlpd.config.plan.flops import batch_spec
    from acrlpd.config.plan.plan import make_plan

    gib = 2**30
    plan = make_plan(config, num_devices=1, accelerator="H200")
    create = jax.jit(lambda key: create_agent(config, key))
    key = jax.random.key(0)
    batch = batch_spec(config)
    start = time.perf_counter()
    compiled = train_step.lower(jax.eval_shape(create, key), batch, key).compile()
    seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    state = analysis.argument_size_in_bytes
    peak = state + analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    planned = plan.memory.peak
    columns = [
        f"{peak / gib:.2f}",
        f"{planned / gib:.2f}",
        f"{planned / peak:.2f}",
        f"{state / gib:.2f}",
        f"{(peak - state) / gib:.2f}",
        f"{(planned - plan.memory.state) / gib:.2f}",
        f"{seconds:.0f}",
    ]
    if not timed:
        return [*columns, "-", f"{plan.step_seconds * 1e3:.0f}"]
    agent = create(key)
    batch = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), batch)
    agent, info = compiled(agent, batch, key)
    jax.block_until_ready(info)
    start = time.perf_counter()
    for _ in range(5):
        agent, info = compiled(agent, batch, key)
    jax.block_until_ready(info)
    return [*columns, f"{(time.perf_counter() - start) / 5 * 1e3:.0f}", f"{plan.step_seconds * 1e3:.0f}"]


if __name__ == "__main__":
    main()
