"""Speed of the full-size pi0 on one GPU, with random weights: the rows of benchmarks/model_gpu-2026-11-15.md.

    python benchmarks/model_gpu.py                     # all rows, one Markdown table
    python benchmarks/model_gpu.py --rows bc_full,sample1 --profile

Needs only jax, flax and optax. `--tiny` runs the same code on a CPU in seconds, as a check of the script.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / "src"), str(pathlib.Path(__file__).parents[1] / ".device-deps")]

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from acrlpd.models import IMAGE_KEYS, Observation, Pi0Config

PEAK_TFLOPS = 989.0  # dense bfloat16 of one H200, from its data sheet
# Forward of one sample with three cameras, and of one more candidate with ten steps, in TFLOP.
FORWARD, TRAIN, CANDIDATE = 4.04, 12.11, 0.386


def random_params(config: Pi0Config, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.create(jax.random.key(0))))
    leaves, tree = jax.tree.flatten(state)
    draw = functools.partial(jax.jit, static_argnums=(1,))(
        lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(dtype)
    )
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return graphdef, jax.tree.unflatten(tree, [draw(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def observation(config: Pi0Config, batch_size: int) -> Observation:
    rng = np.random.default_rng(0)
    shape = (batch_size, *config.image_resolution, 3)
    return jax.device_put(
        Observation(
            images={k: rng.integers(0, 256, shape, dtype=np.uint8) for k in config.image_keys},
            image_masks={k: np.ones(batch_size, bool) for k in config.image_keys},
            state=rng.normal(size=(batch_size, config.action_dim)).astype(np.float32),
            tokenized_prompt=rng.integers(0, config.vocab_size, (batch_size, config.prompt_len), dtype=np.int32),
            tokenized_prompt_mask=np.arange(config.prompt_len) < np.full((batch_size, 1), config.prompt_len // 2),
        )
    )


def time_calls(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, until the device is done."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def top_kernels(call: Callable[[], object], count: int = 25) -> str:
    """Where the device's time goes in one call."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(call())
        (trace,) = pathlib.Path(directory).rglob("*.xplane.pb")
        totals: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            if "/device:GPU" not in plane.name:
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        totals[event.name] += event.duration_ns
                        calls[event.name] += 1
    total = sum(totals.values())
    rows = [f"{total / 1e6:9.2f} ms in {sum(calls.values())} kernels"]
    rows += [f"{ns / 1e6:9.2f} ms {calls[name]:6d} x  {name[:110]}" for name, ns in totals.most_common(count)]
    return "\n".join(rows)


def peak_gib() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / 2**30


def bc_step(config: Pi0Config, batch_size: int):
    """openpi's train step: augmentation, flow-matching loss, clipped AdamW, EMA; everything float32 state."""
    graphdef, params = random_params(config, jnp.float32)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2.5e-5, b1=0.9, b2=0.95, weight_decay=1e-10))
    state = jax.jit(lambda p: {"params": p, "opt": tx.init(p), "ema": jax.tree.map(jnp.copy, p)}, donate_argnums=0)(
        params
    )
    obs = observation(config, batch_size)
    actions = jax.random.normal(jax.random.key(1), (batch_size, config.action_horizon, config.action_dim))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, rng, obs, actions):
        def loss_fn(params):
            return nnx.merge(graphdef, params).compute_loss(rng, obs, actions, train=True).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, state["ema"], params)
        return {"params": params, "opt": opt, "ema": ema}, loss

    box = {"state": state}

    def call():
        box["state"], loss = step(box["state"], jax.random.key(0), obs, actions)
        return loss

    compiled = step.lower(state, jax.random.key(0), obs, actions).compile()
    analysis = compiled.memory_analysis()
    gib = (analysis.argument_size_in_bytes + analysis.temp_size_in_bytes) / 2**30 if analysis else 0.0
    return call, gib


def sample_call(config: Pi0Config, batch_size: int, num_samples: int):
    graphdef, params = random_params(config, jnp.bfloat16)
    obs = observation(config, batch_size)
    sample = jax.jit(
        lambda params, rng, obs: nnx.merge(graphdef, params).sample_candidates(rng, obs, num_samples, num_steps=10)
    )
    return lambda: sample(params, jax.random.key(0), obs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="sample1,candidates32,candidates4x32,bc_full,bc_dots,bc_two")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    config, batch_size, repeats = Pi0Config(), 32, 10
    if args.tiny:
        config = Pi0Config(
            paligemma_variant="dummy", action_expert_variant="dummy", siglip_variant="mu/14", vocab_size=512
        )
        batch_size, repeats = 2, 1
    two = dataclasses.replace(config, image_keys=IMAGE_KEYS[:2])
    bc = {
        "bc_full": dataclasses.replace(config, remat_policy="full"),
        "bc_dots": dataclasses.replace(config, remat_policy="dots"),
        "bc_two": dataclasses.replace(two, remat_policy="full"),
    }
    samples = {"sample1": (1, 1), "candidates32": (1, 32), "candidates4x32": (batch_size, 4)}
    table = ["| work | time | rate | memory (plan of XLA / peak) | MFU |", "|---|---|---|---|---|"]
    for row in args.rows.split(","):
        start = time.perf_counter()
        try:
            if row in bc:
                call, gib = bc_step(bc[row], batch_size)
                seconds = time_calls(call, repeats)
                flops = TRAIN * batch_size
                rate = f"{batch_size / seconds:.1f} samples/s"
            else:
                batch, n = samples[row]
                call, gib = sample_call(config, batch, n), 0.0
                seconds = time_calls(call, repeats)
                flops = batch * (FORWARD + (n - 1) * CANDIDATE)
                rate = f"{batch * n / seconds:.1f} chunks/s"
            mfu = f"{flops / seconds / PEAK_TFLOPS:.1%}"
            table.append(f"| {row} | {1e3 * seconds:.1f} ms | {rate} | {gib:.1f} / {peak_gib():.1f} GiB | {mfu} |")
            print(table[-1], f"(set-up {time.perf_counter() - start:.0f} s)", flush=True)
            if args.profile:
                print(top_kernels(call), flush=True)
            del call
        except Exception as error:  # one row that does not fit must not cost the others
            print(f"| {row} | failed: {str(error).splitlines()[0][:200]} |", flush=True)
    device = jax.devices()[0]
    print(f"\n{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}\n" + "\n".join(table))


if __name__ == "__main__":
    main()
