"""Gradients of a loss over a batch, in one piece or over micro-batches, with the same result."""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

Params = TypeVar("Params")
_Tree = TypeVar("_Tree")


class BatchLoss(Protocol):
    """A loss as six steps, between which a batch may be split. Samples lie along the first axis of all arrays.

    The loss is a sum over samples that is divided by numbers of the whole batch, so that the gradient of a batch is the
    sum of the gradients of its micro-batches, exactly.
    """

    def targets(self, params: Any, inputs: Any) -> Any:
        """Numbers for each sample that are computed first; the backward pass needs nothing of this computation."""

    def view(self, params: Any, inputs: Any) -> Any:
        """The results that `weigh` and `loss` share; each result is computed when it is first needed."""

    def weigh(self, view: Any) -> Any:
        """Numbers for each sample that must be known of the whole batch before the first loss; not differentiated."""

    def balance(self, inputs: Any, weights: Any) -> Any:
        """The numbers of `weigh`, changed where they depend on the other samples of the batch."""

    def normalize(self, inputs: Any, weights: Any) -> Any:
        """The numbers of the whole batch by which sums are divided."""

    def loss(self, view: Any, targets: Any, weights: Any, norm: Any) -> tuple[jax.Array, Any]:
        """The loss, and a record of each sample."""


def loss_in_one_piece(loss: BatchLoss, params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
    """The loss of a whole batch, and (record, weights, norm)."""
    view = loss.view(params, inputs)
    weights = jax.lax.stop_gradient(loss.balance(inputs, loss.weigh(view)))
    norm = loss.normalize(inputs, weights)
    value, record = loss.loss(view, targets, weights, norm)
    return value, jax.lax.stop_gradient((record, weights, norm))


def compute_gradients(
    loss: BatchLoss, params: Params, inputs: Any, num_micro_batches: int
) -> tuple[jax.Array, Any, Any, Params]:
    """Loss, (record, weights, norm) of the whole batch, targets and gradients.

    With micro-batches, a pass of its own weighs all samples. This pass costs nothing where the weights do not depend
    on the networks; otherwise it encodes each sample once more.
    """
    if num_micro_batches == 1:
        targets = loss.targets(params, inputs)
        value_and_grad = jax.value_and_grad(lambda p: loss_in_one_piece(loss, p, inputs, targets), has_aux=True)
        (value, whole), grads = value_and_grad(params)
        return value, whole, targets, grads

    def first_pass(micro: Any) -> tuple[Any, Any]:
        return loss.targets(params, micro), loss.weigh(loss.view(params, micro))

    def second_pass(carry: tuple[jax.Array, Params], micro: Any) -> tuple[tuple[jax.Array, Params], Any]:
        inputs, targets, weights = micro

        def of_params(p: Params) -> tuple[jax.Array, Any]:
            return loss.loss(loss.view(p, inputs), targets, weights, norm)

        (value, record), grads = jax.value_and_grad(of_params, has_aux=True)(params)
        return jax.tree.map(jnp.add, carry, (value, grads)), jax.lax.stop_gradient(record)

    micro = split_batch(inputs, num_micro_batches)
    targets, weights = jax.lax.map(first_pass, micro)
    whole_weights = loss.balance(inputs, merge_batch(weights))
    norm = loss.normalize(inputs, whole_weights)
    zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), params))
    weights = split_batch(whole_weights, num_micro_batches)
    (value, grads), record = jax.lax.scan(second_pass, zero, (micro, targets, weights))
    return value, (merge_batch(record), whole_weights, norm), merge_batch(targets), grads


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
