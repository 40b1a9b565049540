"""Which windows of a batch the policy is cloned from, and how much each counts; critics learn from all windows."""

import jax
import jax.numpy as jnp

from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.improvements.awr import log_weight_of_judged
from acrlpd.agents.improvements.base import SampleWeights, View
from acrlpd.batch import Batch


def cloning_weights(view: View) -> SampleWeights:
    """log k [b]: all 0, unless the config weighs samples by their importance or by their difficulty."""
    hyperparams = view.algorithm.acrlpd
    steps = jnp.sum(view.batch.valid, axis=1)
    log_weight, kept = jnp.zeros_like(steps), {}
    if hyperparams.bc_difficulty_weighting:
        log_weight += jnp.log(jnp.sum(view.flow_losses * view.batch.valid, axis=1) / jnp.maximum(steps, 1.0))
    if hyperparams.bc_importance_weighting:
        log_weight += log_weight_of_judged(view, hyperparams.bc_importance_clip)
    if hyperparams.bc_importance_weighting or hyperparams.policy_data == "advantage":
        kept = {"advantage": view.advantage, "judged": jnp.asarray(view.batch.sequence_mask)}
    return SampleWeights(log_weight=log_weight, size=steps, kept=kept)


def select_policy_data(hyperparams: ACRLPDHyperparams, batch: Batch, cloning: SampleWeights) -> jax.Array | None:
    """bool [B]: whether each window of a whole batch is data of the policy; None if all of them are."""
    if hyperparams.policy_data == "success":
        return jnp.asarray(batch.leads_to_success) > 0
    if hyperparams.policy_data == "advantage":
        judged = jnp.asarray(batch.sequence_mask) > 0
        task = jnp.asarray(batch.task_id)
        return exceeds_quantile(cloning.kept["advantage"], task, judged, hyperparams.advantage_quantile)
    return None


def exceeds_quantile(advantage: jax.Array, task: jax.Array, judged: jax.Array, quantile: float) -> jax.Array:
    """bool [B]: whether an advantage is above the quantile of the advantages of its task in the batch.

    Windows that are not `judged` are left out. The only window of a task has nothing to be compared with, and
    its rank is one half, so batches should be large enough for several windows of each task.
    """
    compared = (task[:, None] == task) & judged  # [B, B]: a row for each window
    below = jnp.sum(compared & (advantage < advantage[:, None]), axis=1)
    equal = jnp.sum(compared & (advantage == advantage[:, None]), axis=1)  # the window itself is one of them
    rank = (below + equal / 2) / jnp.maximum(jnp.sum(compared, axis=1), 1)
    return judged & (rank > quantile)
