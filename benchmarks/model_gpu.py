"""Speed of the full-size pi0 on one GPU, with random weights: the rows of benchmarks/model_gpu-2026-11-15.md.

    python benchmarks/model_gpu.py                     # all rows, one Markdown table
    python benchmarks/model_gpu.py --rows bc_full,sample1 --profile

All rows are compiled together, then timed one by one. Needs only jax, flax and optax. `--tiny` runs the same code on
a CPU in seconds, as a check of the script.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / "src"), str(pathlib.Path(__file__).parents[1] / ".device-deps")]

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from acrlpd.models.families.pi0 import IMAGE_KEYS, Pi0Config
from acrlpd.models.observation import Observation

PEAK_TFLOPS = 989.0  # dense bfloat16 of one H200, from its data sheet
# Forward of one sample with three cameras, and of one more candidate with ten steps, in TFLOP.
FORWARD, TRAIN, CANDIDATE = 4.04, 12.11, 0.386


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (0.02 * jax.random.normal(key, shape)).astype(dtype)


def param_shapes(config: Pi0Config, dtype: Any) -> tuple[nnx.GraphDef, nnx.State]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.create(jax.random.key(0))))
    return graphdef, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), state)


def random_like(shapes: nnx.State) -> nnx.State:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [draw(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)])


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


Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Work:
    """Something to time: lowered without any weights, so that all rows can be compiled before the first is run."""

    lowered: jax.stages.Lowered
    start: Callable[[jax.stages.Compiled], Call]  # allocates
    tflop: float
    units: int
    unit: str


def bc_step(config: Pi0Config, batch_size: int) -> Work:
    """openpi's train step: augmentation, flow-matching loss, clipped AdamW, EMA; everything float32 state."""
    graphdef, shapes = param_shapes(config, jnp.float32)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2.5e-5, b1=0.9, b2=0.95, weight_decay=1e-10))
    obs = observation(config, batch_size)
    actions = jax.random.normal(jax.random.key(1), (batch_size, config.action_horizon, config.action_dim))

    @functools.partial(jax.jit, donate_argnums=0)
    def init(params):
        return {"params": params, "opt": tx.init(params), "ema": jax.tree.map(jnp.copy, params)}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, rng, obs, actions):
        def loss_fn(params):
            return nnx.merge(graphdef, params).compute_loss(rng, obs, actions, train=True).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, state["ema"], params)
        return {"params": params, "opt": opt, "ema": ema}, loss

    def start(compiled: jax.stages.Compiled) -> Call:
        box = {"state": init(random_like(shapes))}

        def call() -> object:
            box["state"], loss = compiled(box["state"], jax.random.key(0), obs, actions)
            return loss

        return call

    lowered = step.lower(jax.eval_shape(init, shapes), jax.random.key(0), obs, actions)
    return Work(lowered, start, TRAIN * batch_size, batch_size, "samples")


def sample_call(config: Pi0Config, batch_size: int, num_samples: int) -> Work:
    graphdef, shapes = param_shapes(config, jnp.bfloat16)
    args = jax.random.key(0), observation(config, batch_size)
    sample = jax.jit(
        lambda params, rng, obs: nnx.merge(graphdef, params).sample_candidates(rng, obs, num_samples, num_steps=10)
    )

    def start(compiled: jax.stages.Compiled) -> Call:
        params = random_like(shapes)
        return lambda: compiled(params, *args)

    tflop = batch_size * (FORWARD + (num_samples - 1) * CANDIDATE)
    return Work(sample.lower(shapes, *args), start, tflop, batch_size * num_samples, "chunks")


def compile_timed(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def measure(work: Work, compiled: jax.stages.Compiled, repeats: int, *, profile: bool) -> str:
    """The cells of one row."""
    analysis = compiled.memory_analysis()
    gib = (analysis.argument_size_in_bytes + analysis.temp_size_in_bytes) / 2**30 if analysis else 0.0
    call = work.start(compiled)
    seconds = time_calls(call, repeats)
    if profile:
        print(top_kernels(call), flush=True)
    mfu = work.tflop / seconds / PEAK_TFLOPS
    return f"{1e3 * seconds:.1f} ms | {work.units / seconds:.1f} {work.unit}/s | {gib:.1f} GiB | {mfu:.1%}"


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
    full = dataclasses.replace(config, remat_policy="full")
    works: dict[str, Callable[[], Work]] = {
        "sample1": lambda: sample_call(config, 1, 1),
        "candidates32": lambda: sample_call(config, 1, 32),
        "candidates4x32": lambda: sample_call(config, batch_size, 4),
        "bc_full": lambda: bc_step(full, batch_size),
        "bc_dots": lambda: bc_step(dataclasses.replace(config, remat_policy="dots"), batch_size),
        "bc_two": lambda: bc_step(dataclasses.replace(full, image_keys=IMAGE_KEYS[:2]), batch_size),
    }
    chosen = {row: works[row]() for row in args.rows.split(",")}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(compile_timed, [work.lowered for work in chosen.values()]))
    table = ["| work | time | rate | memory (XLA) | MFU |", "|---|---|---|---|---|"]
    for (row, work), (executable, seconds) in zip(chosen.items(), compiled, strict=True):
        try:
            table.append(f"| {row} | {measure(work, executable, repeats, profile=args.profile)} |")
            print(table[-1], f"(compiled in {seconds:.0f} s)", flush=True)
        except jax.errors.JaxRuntimeError as error:  # one row that does not fit must not cost the others
            print(f"| {row} | failed: {str(error).splitlines()[0][:200]} |", flush=True)
    device = jax.devices()[0]
    print(f"\n{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}\n" + "\n".join(table))


if __name__ == "__main__":
    main()
