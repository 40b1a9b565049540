"""Debug mode: every few lines of metrics a close look at an update, as files under <run>/debug/ and as metrics.

An inspection computes gradients by layer group, actions, critics and choices on the devices. This is the only module
of monitoring that looks inside an agent.
"""

import contextlib
import functools
import io
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image, ImageDraw

from acrlpd.agents import Agent
from acrlpd.agents.accumulation import split_batch
from acrlpd.batch import Batch, Feed, first_batch
from acrlpd.models.policy import draw_noise
from acrlpd.policies.acting_model import ChosenActions, acting_model, choose_actions
from acrlpd.process import compile_fast

logger = logging.getLogger(__name__)

DEBUG_DIRECTORY = "debug"
# Lines of metrics from one inspection to the next, and inspections from one contact sheet to the next.
LINES_PER_INSPECTION = 10
INSPECTIONS_PER_SHEET = 10
_SHEET_ROWS = 8
_CAPTION_HEIGHT = 14
_CAPTION_WIDTH = 200
# Normalised actions beyond this count in the outermost bins.
ACTION_RANGE = 3.0
NUM_BINS = 40
# Parts of a parameter's name that make its group, at most.
_GROUP_DEPTH = 5
# Modules whose parameters are stacked along a leading axis, one entry per layer.
_STACKED = ("layers", "encoderblock")

# Arrays in nested dicts, with the names that they have in the file of an inspection.
Inspection = dict[str, Any]


class DebugMode:
    """Inspects the update of the first line of metrics and of every tenth line, and draws a few contact sheets.

    An inspection computes gradients and candidates once more, and costs one compile. The step alone decides
    whether an update is inspected, so a resumed run inspects the same updates.
    """

    def __init__(self, directory: pathlib.Path | None, log_frequency: int) -> None:
        """`directory` is that of the run, or None on a process that computes with the others but writes nothing."""
        self._directory = None if directory is None else directory / DEBUG_DIRECTORY
        self._log_frequency = log_frequency
        self._pending: dict[int, Inspection] = {}  # step -> result, perhaps still being computed
        self._has_sheet = False

    def before_update(self, step: int, agent: Agent, feed: Feed, rng: jax.Array) -> None:
        """`step` is the step that this update makes."""
        period = self._log_frequency * LINES_PER_INSPECTION
        is_sheet_due = not self._has_sheet or step % (period * INSPECTIONS_PER_SHEET) == 0
        is_inspection_due = step == self._log_frequency or step % period == 0
        if not (is_sheet_due or is_inspection_due):
            return
        batch = first_batch(feed)
        self._has_sheet = True
        if is_sheet_due and self._directory is not None and (sheet := contact_sheet(batch)) is not None:
            self._write(f"{step:08d}.png", sheet)
        if is_inspection_due:
            self._pending[step] = inspect_update(agent, batch, rng)

    def on_line(self, step: int) -> dict[str, float]:
        """The metrics of the inspection of this step, if there was one; by now the devices have computed it."""
        inspection = self._pending.pop(step, None)
        if inspection is None:
            return {}
        inspection = jax.device_get(inspection)
        self._write(f"{step:08d}.json", (json.dumps(describe(inspection), allow_nan=False) + "\n").encode())
        return summarize(inspection)

    def _write(self, name: str, content: bytes) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / name).write_bytes(content)
        except OSError as error:  # a debug file must not cost the run
            logger.warning("%s cannot be written: %s", self._directory / name, error)


def inspect_update(agent: Agent, batch: Batch, rng: jax.Array) -> Inspection:
    """Inspects the update that `agent` is about to make on `batch` with the run's key; changes nothing.

    With gradient accumulation only the first micro-batch is inspected: more may not fit into memory.
    """
    sharding = agent.step.sharding
    mesh = getattr(sharding, "mesh", None)
    with jax.set_mesh(mesh) if isinstance(mesh, jax.sharding.Mesh) else contextlib.nullcontext():
        return _compiled(sharding)(agent, batch, rng)


@functools.cache
def _compiled(sharding: jax.sharding.Sharding) -> Callable[[Agent, Batch, jax.Array], Inspection]:
    """The compiled inspection. Every process gets the whole result."""
    return jax.jit(_inspect, out_shardings=sharding, compiler_options=compile_fast())


def _inspect(agent: Agent, batch: Batch, rng: jax.Array) -> Inspection:
    """Looks at one batch; a = real action dims. Without a critic there are no entries about critics and choices."""
    if agent.gradient_accumulation_steps > 1:
        batch = jax.tree.map(lambda x: x[0], split_batch(batch, agent.gradient_accumulation_steps))
    algorithm = agent.algorithm
    choice = _choose(agent, batch, jax.random.fold_in(jax.random.fold_in(rng, agent.step), 1))
    chosen, logged = algorithm.critic_chunks(choice.actions), algorithm.critic_chunks(batch.actions)
    inspection = {
        "gradient_norms": gradient_norms(agent, batch, rng),
        "actions": {
            "data": _histograms(logged, algorithm.qchunking.action_dim),  # int32 [a, NUM_BINS]
            "chosen": _histograms(chosen, algorithm.qchunking.action_dim),
            "distance": jnp.sqrt(jnp.mean(jnp.square(chosen - logged))),
        },
    }
    return inspection | (_inspect_critics(agent, batch, choice) if algorithm.has_critic else {})


def _choose(agent: Agent, batch: Batch, rng: jax.Array) -> ChosenActions:
    """What the policy that learns would do at the observations of a batch."""
    hyperparams = agent.algorithm.acrlpd
    num_samples = hyperparams.num_action_samples if agent.algorithm.has_critic else 1  # a critic has to choose
    noise_rng, seed_rng = jax.random.split(rng)
    b, *chunk_shape = batch.actions.shape
    return choose_actions(
        acting_model(agent, average=False),
        batch.observations,
        draw_noise(noise_rng, (b, num_samples, *chunk_shape)),
        jnp.full(b, num_samples),
        jax.random.bits(seed_rng, (b,), jnp.uint32),
        num_steps=hyperparams.sampling_steps,
        exploration=hyperparams.best_of_n,
    )


def _inspect_critics(agent: Agent, batch: Batch, choice: ChosenActions) -> Inspection:
    """The values of E critics at the logged chunks that they learn from, and which of N candidates they choose."""
    networks = agent.networks()
    observation = networks.policy.preprocess(None, batch.observations, train=False)
    chunk = agent.algorithm.logged(batch)
    ensemble, features = networks.critics.online_ensemble, networks.encode(observation).features
    member_q = ensemble(features, observation, chunk[:, None])[:, 0]  # [b, E]
    mask = jnp.asarray(batch.sequence_mask, bool)[:, None]
    q = choice.q_values
    assert q is not None  # without critics there is no inspection of critics
    ends = {"lowest": jnp.mean(jnp.min(q, axis=1)), "mean": jnp.mean(q), "highest": jnp.mean(jnp.max(q, axis=1))}
    return {
        "critics": {
            "mean_q": jnp.mean(member_q, axis=0, where=mask),  # [E]
            "std_q": jnp.std(member_q, axis=0, where=mask),
        },
        # How often each candidate was chosen, int32 [N], and the values of the candidates, mean over the batch.
        "best_of_n": {"choices": jnp.bincount(choice.index, length=q.shape[1]), "candidate_q": ends},
    }


def gradient_norms(agent: Agent, batch: Batch, rng: jax.Array) -> dict[str, jax.Array]:
    """Norms of the joint loss's gradient by group, "policy/..." and "critic/...", before clipping.

    A group whose layers are stacked has one norm per layer, [layers]; other groups have one, [1].
    """

    def loss(params: dict[str, Any]) -> jax.Array:
        critics = agent.critics.replace(online=params["critic"])
        return agent.replace(policy_params=params["policy"], critics=critics).compute_loss(batch, rng)[0]

    grads = jax.grad(loss)({"policy": agent.policy_params, "critic": agent.critics.online})
    squares: dict[str, jax.Array] = {}
    for component, state in grads.items():
        for path, leaf in nnx.to_flat_state(state):
            group, is_stacked = layer_group(path)
            axes = tuple(range(1, leaf.ndim)) if is_stacked else None
            square = jnp.atleast_1d(jnp.sum(jnp.square(leaf[...].astype(jnp.float32)), axis=axes))
            squares[f"{component}/{group}"] = squares.get(f"{component}/{group}", 0.0) + square
    return {group: jnp.sqrt(square) for group, square in sorted(squares.items())}


def layer_group(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The group of a parameter by its name, and whether its leading axis counts layers."""
    names = [str(part) for part in path]
    modules = names[:-1] or names
    return "/".join(modules[:_GROUP_DEPTH]), any(name in _STACKED for name in names)


def _histograms(chunks: jax.Array, action_dim: int) -> jax.Array:
    """A histogram of every action dim over samples and steps, [b, H * a] -> [a, NUM_BINS]."""
    actions = chunks.reshape(-1, action_dim)
    place = (actions + ACTION_RANGE) / (2 * ACTION_RANGE) * NUM_BINS
    index = jnp.clip(jnp.floor(place), 0, NUM_BINS - 1).astype(jnp.int32)
    return jax.vmap(lambda column: jnp.bincount(column, length=NUM_BINS), in_axes=1)(index)


def summarize(inspection: Inspection) -> dict[str, float]:
    """The numbers of an inspection that become metrics; its arrays must be on the host."""
    norms, actions = inspection["gradient_norms"], inspection["actions"]
    metrics = {f"debug/gradient/{group}": float(np.linalg.norm(found)) for group, found in norms.items()}
    metrics["debug/action_distance"] = float(actions["distance"])
    metrics["debug/action_overlap"] = histogram_overlap(actions["data"], actions["chosen"])
    if "best_of_n" not in inspection:
        return metrics
    choices, candidate_q = inspection["best_of_n"]["choices"], inspection["best_of_n"]["candidate_q"]
    share = np.asarray(choices, np.float64) / np.sum(choices)
    entropy = -float(np.sum(share * np.log(share, where=share > 0, out=np.zeros_like(share))))
    return metrics | {
        "debug/critic_range": float(np.ptp(inspection["critics"]["mean_q"])),
        "debug/candidate_q_range": float(candidate_q["highest"]) - float(candidate_q["lowest"]),
        # 1: every index is chosen as often as any other, which is healthy; 0: the same index is always chosen.
        "debug/choice_entropy": entropy / float(np.log(max(len(share), 2))),
    }


def histogram_overlap(first: Any, second: Any) -> float:
    """The share that two sets of histograms [a, bins] have in common: 1 where they are equal, 0 where apart."""
    shares = [np.asarray(x, np.float64) / np.sum(x, axis=1, keepdims=True) for x in (first, second)]
    return float(np.mean(np.sum(np.minimum(*shares), axis=1)))


def describe(inspection: Inspection) -> dict[str, Any]:
    """A whole inspection as plain data."""
    content = jax.tree.map(_plain, inspection)
    edges = np.linspace(-ACTION_RANGE, ACTION_RANGE, NUM_BINS + 1)
    content["actions"]["bin_edges"] = [round(edge, 6) for edge in edges.tolist()]
    return content


def _plain(array: Any) -> Any:
    """An array as nested lists, or a number. JSON has no NaN, so a number that is not finite becomes None."""
    plain = np.asarray(array).astype(object)
    plain[~np.isfinite(array)] = None
    return plain.tolist()


def contact_sheet(batch: Batch) -> bytes | None:
    """The first windows of a batch as a PNG: one row per window, with every camera now and a chunk later.

    None where there are no cameras. With several hosts, the sheet shows the windows of this host.
    """
    now, later = batch.observations.images, batch.next_observations.images
    columns = [(camera, _local(images)) for camera, images in now.items()]
    columns += [(f"{camera} later", _local(images)) for camera, images in later.items()]
    if not columns:
        return None
    rows = min(_SHEET_ROWS, columns[0][1].shape[0])
    height, width = columns[0][1].shape[1:3]
    cell, pitch = height + _CAPTION_HEIGHT, max(width, _CAPTION_WIDTH)
    sheet = Image.new("RGB", (pitch * len(columns), cell * rows + _CAPTION_HEIGHT), "black")
    pen = ImageDraw.Draw(sheet)
    episodes, steps, rewards = (_local(x) for x in (batch.episode_id, batch.step_id, batch.rewards))
    for j, (name, images) in enumerate(columns):
        pen.text((j * pitch + 2, 1), name, fill="white")
        for i in range(rows):
            top = _CAPTION_HEIGHT + i * cell
            sheet.paste(Image.fromarray(images[i]), (j * pitch, top))
            if j == 0:
                caption = f"ep {episodes[i]} step {steps[i]} reward {rewards[i].sum():.3g}"
                pen.text((2, top + height), caption, fill="white")
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    return png.getvalue()


def _local(array: Any) -> np.ndarray:
    """The first part of an array that this process holds."""
    return np.asarray(array.addressable_data(0) if isinstance(array, jax.Array) else array)
