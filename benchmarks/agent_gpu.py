"""Speed of the agent's update on one GPU, with random weights and data.

    python benchmarks/agent_gpu.py                        # all rows, one Markdown table, about 9 minutes
    python benchmarks/agent_gpu.py --rows state,ensemble  # some of them

Every row runs in a process of its own, so that its peak memory is its own. Needs only jax, flax, optax, rich
and yaml. `--tiny` runs the same code on a CPU in a minute, as a check of the script.

Rows: `full` and `full_dots` (all of pi0 trains, with full and with dots-saveable rematerialisation), `aloha32`
and `aloha16` (the aloha preset's frozen backbone at batch 32 and 16), `parts` (the joint step against the sum
of its necessary parts), `ensemble` (10 critics against 1), `state` and `state_float32` (the paper's
state-space settings, 200 updates per call). Rows that end in `_implicit` have the backup `implicit_value`.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / ".device-deps"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from acrlpd.agents import (
    Agent,
    Call,
    train_step,
    train_steps,
)
from acrlpd.agents.agent import SMALL_NETWORK_OPTIONS
from acrlpd.agents.algorithm import prepare
from acrlpd.agents.backups.base import Backup
from acrlpd.agents.backups.best_of_n import BestOfN
from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.best_of_n import take_candidate
from acrlpd.agents.networks import create_critic_networks
from acrlpd.agents.optimizers.base import create_optimizer
from acrlpd.agents.td_loss import td_loss
from acrlpd.batch import Batch, StackedBatches
from acrlpd.config import ACRLPDHyperparams, MLPCritics, QChunkingConfig, RLTrainConfig, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Features

HORIZON, REAL_DIM = 20, 14
TOKENS = 816  # of pi0's prefix: three cameras and a prompt
SCANNED = 200  # updates per call of the state-space rows
ROWS = (
    "state", "state_float32", "state_implicit", "ensemble", "full", "full_dots", "full_implicit", "aloha32", "aloha16",
    "aloha32_implicit", "parts",
)  # fmt: skip


def pi0_config(tiny: bool, *, frozen: bool, remat: str = "full") -> RLTrainConfig:
    """Full-size pi0, 3 cameras, action_horizon 50, H 20, N 4, 10 steps, awr, 10 critics of 512 x 3."""
    model = Pi0Config(remat_policy=remat)
    if tiny:
        model = Pi0Config(
            paligemma_variant="dummy",
            action_expert_variant="dummy",
            siglip_variant="mu/14",
            vocab_size=512,
            image_resolution=(28, 28),
            remat_policy=remat,
        )
    return RLTrainConfig(
        name="benchmark",
        model=model,
        freeze_pi0_backbone=frozen,
        critic=MLPCritics(num_critics=10, hidden_dims=(512, 512, 512)),
        acrlpd=ACRLPDHyperparams(num_action_samples=4, sampling_steps=10),
        qchunking=QChunkingConfig(horizon_length=HORIZON, action_dim=REAL_DIM),
    )


def with_implicit_value(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, backup=ImplicitValue())


def random_agent(config: RLTrainConfig) -> Agent:
    """Random weights in the agent's shapes; compiling 50 initialisers would take longer than measuring."""
    shapes = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    def leaf(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "opt_state" in name or not jnp.issubdtype(spec.dtype, jnp.floating):
            return jnp.zeros(spec.shape, spec.dtype)
        if "loss_weights" in name:
            return jnp.ones(spec.shape, spec.dtype)
        return normal(jax.random.key(len(name)), spec.shape, spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def make_batch(config: RLTrainConfig, batch_size: int) -> Batch:
    rng = np.random.default_rng(0)
    spec, actions = config.model.inputs_spec(batch_size)
    horizon = config.qchunking.horizon_length

    def observation() -> Observation:
        images = {key: rng.integers(0, 256, image.shape, np.uint8) for key, image in spec.images.items()}
        prompt = spec.tokenized_prompt
        return Observation(
            images=images,
            image_masks={key: np.ones(batch_size, bool) for key in images},
            state=rng.normal(size=spec.state.shape).astype(np.float32),
            tokenized_prompt=None if prompt is None else rng.integers(0, 500, prompt.shape, np.int32),
            tokenized_prompt_mask=None if prompt is None else np.arange(prompt.shape[1]) < np.full((batch_size, 1), 24),
        )

    def f32(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    return jax.device_put(
        Batch(
            observations=observation(),
            next_observations=observation(),
            actions=rng.normal(size=actions.shape).astype(np.float32),
            valid=f32(batch_size, actions.shape[1]),
            rewards=rng.normal(size=(batch_size, horizon)).astype(np.float32),
            masks=f32(batch_size, horizon),
            terminals=0 * f32(batch_size, horizon),
            next_terminal=0 * f32(batch_size),
            sequence_mask=f32(batch_size),
            leads_to_success=f32(batch_size),
            importance=f32(batch_size),
            task_id=np.zeros(batch_size, np.int32),
            episode_id=np.zeros(batch_size, np.int32),
            step_id=np.zeros(batch_size, np.int32),
        )
    )


def time_calls(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, until the device is done; the first two warm up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[2:]))


def peak_gib() -> float:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30


def repeat_update(step: Callable[..., Any], state: Any, *args: Any) -> Callable[[], Any]:
    """A call that feeds the state it returns into the next one, as training does."""
    box = [state]

    def call() -> Any:
        box[0], info = step(box[0], *args)
        return box[0] if info is None else info

    return call


def joint_row(config: RLTrainConfig, batch_size: int, repeats: int) -> dict[str, str]:
    call = repeat_update(train_step, random_agent(config), make_batch(config, batch_size), jax.random.key(0))
    seconds = time_calls(call, repeats)
    return {"time": f"{1e3 * seconds:.0f} ms", "rate": f"{batch_size / seconds:.1f} samples/s"}


def parts_row(config: RLTrainConfig, batch_size: int, repeats: int) -> dict[str, str]:
    """The joint step, and separately: a cloning step, one prefix without gradient, candidates at both ends."""
    box, batch, key = [random_agent(config)], make_batch(config, batch_size), jax.random.key(0)

    @functools.partial(jax.jit, donate_argnums=0)
    def bc_step(agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, jax.Array]:
        (prepared, draws), _ = prepare(agent, batch, rng)

        def loss(params: Any) -> jax.Array:
            policy = agent.replace(policy_params=params).policy()
            context = policy.encode(prepared.observations, features=False)
            losses = policy.flow_matching_loss(context, prepared.actions, draws.flow_noise, draws.flow_time)
            return jnp.sum(losses * prepared.valid) / jnp.sum(prepared.valid)

        value, grads = jax.value_and_grad(loss)(agent.policy_params)
        updates, opt_state = agent.policy_optimizer.tx.update(grads, agent.policy_opt_state, agent.policy_params)
        params = optax.apply_updates(agent.policy_params, updates)
        return agent.replace(policy_params=params, policy_opt_state=opt_state).update_ema_parameters(), value

    @jax.jit
    def prefix(agent: Agent, observation: Observation) -> Any:
        policy = agent.policy()
        return policy.encode(policy.preprocess(None, observation, train=False))

    @jax.jit
    def candidates(agent: Agent, context: Any, noise: jax.Array) -> jax.Array:
        return agent.policy().denoise(context, noise, num_steps=10)

    noise = jax.random.normal(key, (batch_size, 4, config.model.action_horizon, config.model.action_dim))

    def update(step: Callable[..., Any]) -> Any:
        box[0], result = step(box[0], batch, key)
        return result

    context = [prefix(box[0], batch.next_observations)]
    seconds = {
        "prefix": time_calls(lambda: prefix(box[0], batch.next_observations), repeats),
        "candidates": 2 * time_calls(lambda: candidates(box[0], context[0], noise), repeats),
    }
    context.clear()
    seconds["BC step"] = time_calls(lambda: update(bc_step), repeats)
    joint = time_calls(lambda: update(train_step), repeats)
    parts = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in seconds.items())
    return {
        "time": f"{1e3 * joint:.0f} ms against {1e3 * sum(seconds.values()):.0f} ms ({parts})",
        "rate": f"{joint / sum(seconds.values()):.2f} x the sum of its parts",
    }


def ensemble_row(batch_size: int, features: int, repeats: int) -> dict[str, str]:
    """All that an update asks of the critics, with pi0's feature width and 8 candidates.

    Online critics choose, target critics judge, the TD loss and its gradient, optimizer and target update.
    Medians of three compilations: XLA times its kernels when it compiles, and does not choose the same every time.
    """
    config = pi0_config(tiny=False, frozen=False)
    optimizer = create_optimizer(config.critic_optimizer, config.critic_lr_schedule)

    def seconds(num_critics: int) -> float:
        critic = dataclasses.replace(config.critic, num_critics=num_critics)
        sizes = {"feature_dim": features, "state_dim": 32, "chunk_dim": HORIZON * REAL_DIM}
        critics = create_critic_networks(critic, jax.random.key(0), **sizes)
        keys = jax.random.split(jax.random.key(1), 3)
        tokens = jax.random.normal(keys[0], (batch_size, TOKENS, features), jnp.bfloat16)
        feature = Features(tokens, jnp.full(batch_size, TOKENS))
        seen = Observation({}, {}, jax.random.normal(keys[1], (batch_size, 32)))
        chunks = jax.random.normal(keys[2], (batch_size, 8, HORIZON * REAL_DIM))

        def update(carry: Any, _: None) -> Any:
            critics, opt_state = carry
            online, target = critics.online_ensemble, critics.target_ensemble
            ranks = online.rank(feature, seen, chunks, jnp.bfloat16)
            best = take_candidate(chunks, jnp.argmax(ranks, axis=1))
            value = target.aggregate(target(feature, seen, best[:, None])[:, 0])

            def loss(online: Any) -> jax.Array:
                q = critics.replace(online=online).online_ensemble(feature, seen, chunks[:, :1])[:, 0]
                return jnp.mean(td_loss(q, 0.9 * value, config.acrlpd))

            grads = jax.grad(loss)(critics.online)
            updates, opt_state = optimizer.tx.update(grads, opt_state, critics.online)
            critics = critics.replace(online=optax.apply_updates(critics.online, updates))
            return (critics.soft_update_target_networks(0.005), opt_state), None

        run = jax.jit(lambda carry: jax.lax.scan(update, carry, length=20), donate_argnums=0)
        return time_calls(repeat_update(run, (critics, optimizer.tx.init(critics.online))), repeats) / 20

    one, ten = (statistics.median(seconds(n) for _ in range(3)) for n in (1, 10))
    return {"time": f"{1e3 * ten:.3f} ms against {1e3 * one:.3f} ms", "rate": f"{ten / one:.2f} x one critic"}


def state_row(
    dtype: str,
    scanned: int,
    repeats: int,
    *,
    tiny: bool,
    backup: Backup = BestOfN(),  # noqa: B008
) -> dict[str, str]:
    """obs 37, action 5, H 5, N 32, 10 flow steps, 4 x 512, 2 critics, batch 256."""
    config = dataclasses.replace(get_config("qc_cube_double"), backup=backup)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    if tiny:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_dims=(32, 32)))
    batch = make_batch(config, config.batch_size)
    batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (scanned, *x.shape)), batch)
    step = jax.jit(train_steps, donate_argnames="agents", compiler_options=SMALL_NETWORK_OPTIONS)
    weights = jnp.full(scanned, config.acrlpd.loss_weights.bc_weight)
    call = Call(StackedBatches(batches, scanned), weights, jax.random.key(0))
    seconds = time_calls(repeat_update(step, [random_agent(config)], [call], scanned), repeats) / scanned
    return {"time": f"{1e6 * seconds:.0f} us", "rate": f"{1 / seconds:.4g} updates/s"}


def run_row(name: str, *, tiny: bool) -> dict[str, str]:
    repeats = 2 if tiny else 8
    batch_size, half = (2, 1) if tiny else (32, 16)
    rows: dict[str, Callable[[], dict[str, str]]] = {
        "full": lambda: joint_row(pi0_config(tiny, frozen=False), batch_size, repeats),
        "full_dots": lambda: joint_row(pi0_config(tiny, frozen=False, remat="dots"), batch_size, repeats),
        "aloha32": lambda: joint_row(pi0_config(tiny, frozen=True), batch_size, repeats),
        "aloha16": lambda: joint_row(pi0_config(tiny, frozen=True), half, repeats),
        "full_implicit": lambda: joint_row(with_implicit_value(pi0_config(tiny, frozen=False)), batch_size, repeats),
        "aloha32_implicit": lambda: joint_row(with_implicit_value(pi0_config(tiny, frozen=True)), batch_size, repeats),
        "parts": lambda: parts_row(pi0_config(tiny, frozen=False), batch_size, repeats),
        "ensemble": lambda: ensemble_row(batch_size, 64 if tiny else 2048, repeats),
        "state": lambda: state_row("bfloat16", 2 if tiny else SCANNED, repeats, tiny=tiny),
        "state_float32": lambda: state_row("float32", 2 if tiny else SCANNED, repeats, tiny=tiny),
        "state_implicit": lambda: state_row(
            "bfloat16", 2 if tiny else SCANNED, repeats, tiny=tiny, backup=ImplicitValue()
        ),
    }
    start = time.perf_counter()
    result = rows[name]()
    return result | {"peak": f"{peak_gib():.1f} GiB", "took": f"{time.perf_counter() - start:.0f} s"}


GOALS = {
    "full": "20 samples/s, goal 28",
    "full_dots": "20 samples/s, goal 28",
    "aloha32": "40 samples/s",
    "aloha16": "peak under 22 GiB",
    "parts": "at most 1.15 x",
    "ensemble": "under 2.5 x",
    "state": "1000 updates/s, goal 2000",
    "state_float32": "(the same, policy in tf32)",
    "full_implicit": "(against full)",
    "aloha32_implicit": "(against aloha32)",
    "state_implicit": "(against state)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(run_row(args.row, tiny=args.tiny)))
        return
    table = ["| row | time | rate | peak memory | wanted |", "|---|---|---|---|---|"]
    for row in args.rows.split(","):
        command = [sys.executable, __file__, "--row", row, *(["--tiny"] if args.tiny else [])]
        env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            error = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), "see stderr")
            print(f"{row} failed: {error[:300]}", flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        table.append(f"| {row} | {result['time']} | {result['rate']} | {result['peak']} | {GOALS[row]} |")
        print(table[-1], f"(row took {result['took']})", flush=True)
    code = "import jax; print(jax.devices()[0].device_kind, '| jax', jax.__version__)"
    device = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    print(f"\n{device} | {time.strftime('%Y-%m-%d')}\n\n" + "\n".join(table))


if __name__ == "__main__":
    main()
