"""Gradients of the joint loss, in one piece or over micro-batches with the same result."""

from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.joint_loss import (
    CRITIC_TERMS,
    POLICY_TERMS,
    Draws,
    Networks,
    Record,
    Targets,
    Terms,
    compute_sample_weights,
    compute_targets,
    flow_losses,
    joint_loss,
)
from acrlpd.agents.loss_functions import (
    Algorithm,
    Normalizers,
    SampleWeights,
    neutral_weights,
    normalizers,
)
from acrlpd.batch import Batch

_Tree = TypeVar("_Tree")


@flax.struct.dataclass
class Params:
    """What gradients are taken of; a part that is None does not learn in this update."""

    policy: nnx.State | None = None
    critic: nnx.State | None = None
    temperature: nnx.State | None = None


def compute_gradients(
    algorithm: Algorithm,
    networks_at: Callable[[Params], Networks],
    params: Params,
    loss_weights: LossWeights,
    batch: Batch,
    draws: Draws,
    subset_rng: jax.Array,
    terms: Terms,
    num_micro_batches: int,
) -> tuple[jax.Array, Record, Normalizers, Params]:
    """Loss, per-sample record, normalizers and gradients of one update.

    The targets are computed first and outside of what is differentiated, so nothing of them is stored
    for the backward pass.

    With micro-batches, weights that are normalised over the batch must be known before the first
    gradient, so they get a pass of their own without gradient: one more prefix per observation, only
    when micro-batches and such weights meet.
    """

    def targets_of(batch: Batch, draws: Draws) -> Targets | None:
        if not terms & CRITIC_TERMS:
            return None
        return compute_targets(algorithm, networks_at(params), batch, draws, subset_rng)

    def gradients_of(
        batch: Batch, draws: Draws, targets: Targets | None, given: tuple[SampleWeights, Normalizers] | None
    ) -> Any:
        def loss(params: Params) -> tuple[jax.Array, tuple[Record, Normalizers]]:
            networks = networks_at(params)
            return joint_loss(algorithm, networks, loss_weights, batch, draws, targets, terms, given)

        return jax.value_and_grad(loss, has_aux=True)(params)

    if num_micro_batches == 1:
        (loss, (record, norm)), grads = gradients_of(batch, draws, targets_of(batch, draws), None)
        return loss, record, norm, grads

    def first_pass(micro: tuple[Batch, Draws]) -> tuple[Targets | None, SampleWeights]:
        batch, draws = micro
        weights = neutral_weights(batch)
        if terms & POLICY_TERMS and algorithm.needs_batch_weights:
            networks = networks_at(params)
            context = networks.encode(batch.observations)
            flow_loss = flow_losses(networks.policy, context, batch, draws)
            weights = compute_sample_weights(algorithm, networks, batch, draws, context, flow_loss)
        return targets_of(batch, draws), weights

    def second_pass(carry: tuple[jax.Array, Params], micro: Any) -> tuple[tuple[jax.Array, Params], Record]:
        batch, draws, targets, weights = micro
        (loss, (record, _)), grads = gradients_of(batch, draws, targets, (weights, norm))
        return jax.tree.map(jnp.add, carry, (loss, grads)), record

    micro = split_batch((batch, draws), num_micro_batches)
    targets, weights = jax.lax.map(first_pass, micro)
    norm = normalizers(algorithm, batch, merge_batch(weights))
    zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), params))
    (loss, grads), record = jax.lax.scan(second_pass, zero, (*micro, targets, weights))
    return loss, merge_batch(record), norm, grads


def split_batch(tree: _Tree, parts: int) -> _Tree:
    """[b, ...] -> [parts, b / parts, ...], every part taking each parts-th sample.

    Interleaved, so that a batch whose samples lie on several devices is split on each of them.
    """

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % parts:
            raise ValueError(
                f"a batch of {x.shape[0]} samples cannot be split into {parts} micro-batches: choose "
                f"training.gradient_accumulation_steps so that it divides batch_size"
            )
        return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, tree)


def merge_batch(tree: _Tree) -> _Tree:
    """The inverse of `split_batch`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)
