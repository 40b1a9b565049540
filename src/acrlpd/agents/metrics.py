"""What an update reports: scalars of the whole batch, made from per-sample records."""

from typing import Any

import jax
import jax.numpy as jnp

from acrlpd.agents.joint_loss import POLICY_TERMS, Record, Targets, Terms
from acrlpd.agents.loss_functions import Algorithm, Normalizers
from acrlpd.batch import Batch
from acrlpd.models.observation import Array

Info = dict[str, jax.Array]


def loss_info(
    algorithm: Algorithm, batch: Batch, record: Record, norm: Normalizers, alpha: jax.Array, terms: Terms
) -> Info:
    """Losses and statistics of what was computed; an update of the critics alone has no loss of the policy."""
    info = {
        "alpha_value": alpha,
        "valid_samples": jnp.sum(batch.sequence_mask),
        "mask_ratio": jnp.mean(batch.sequence_mask),
        "valid_step_ratio": jnp.mean(batch.valid),
        "reward_mean": jnp.sum(batch.rewards) / jnp.maximum(jnp.sum(batch.valid[:, : batch.rewards.shape[1]]), 1.0),
        "reward_min": jnp.min(batch.rewards),
        "reward_max": jnp.max(batch.rewards),
    }
    if record.targets is not None:
        info |= _target_info(algorithm, record.targets, alpha)
    if record.q is not None:
        info |= _critic_info(batch, record, norm)
    if terms & POLICY_TERMS:
        awr = algorithm.has_actor_loss and algorithm.acrlpd.actor_loss == "awr"
        info["actor_loss"] = jnp.sum(record.actor_loss) / (norm.awr if awr else norm.samples)
        info["bc_loss"] = jnp.sum(record.bc_loss) / norm.bc
        if algorithm.needs_advantage:
            info |= _weight_info(record, norm)
    return info


def _target_info(algorithm: Algorithm, targets: Targets, alpha: jax.Array) -> Info:
    entropy = jnp.mean(targets.entropy)
    alpha_loss = alpha * (entropy - algorithm.target_entropy)
    return {
        "alpha_loss": alpha_loss if algorithm.acrlpd.learnable_temperature else jnp.zeros_like(alpha_loss),
        "entropy_estimate": entropy,
        "best_of_n_gain": jnp.mean(targets.best_q - targets.mean_q),
        "candidate_q_std": jnp.mean(targets.std_q),
        "candidate_diversity": jnp.mean(targets.diversity),
    }


def _critic_info(batch: Batch, record: Record, norm: Normalizers) -> Info:
    """Over the windows the critic may learn from."""

    def mean(x: Array) -> jax.Array:
        return jnp.sum(x * batch.sequence_mask) / norm.critic

    assert record.q is not None and record.td_loss is not None and record.targets is not None
    q, target = jnp.mean(record.q, axis=-1), record.targets.value
    return {
        "critic_loss": mean(record.td_loss),
        "q_mean": mean(q),
        "q_std": jnp.sqrt(mean(jnp.square(q - mean(q)))),
        "q_ensemble_std": mean(jnp.std(record.q, axis=-1)),
        "target_q_mean": mean(target),
        "td_error_mean": mean(jnp.mean(jnp.abs(record.q - target[:, None]), axis=-1)),
        "bootstrap_ratio": mean(batch.masks[:, -1]),
    }


def _weight_info(record: Record, norm: Normalizers) -> Info:
    weight = jnp.exp(record.weights.log_importance - norm.log_shift)
    raw = jnp.exp(record.weights.log_importance)
    return {
        "advantage_mean": jnp.mean(record.weights.advantage),
        "advantage_std": jnp.std(record.weights.advantage),
        "awr_weight_mean": jnp.mean(raw),
        "awr_weight_max": jnp.max(raw),
        # Effective share of the batch: 1 when all weights are equal, 1 / B when one sample has it all.
        "awr_effective_ratio": jnp.square(jnp.mean(weight)) / jnp.mean(jnp.square(weight)),
    }


def global_norm(tree: Any) -> jax.Array:
    """L2 norm over all leaves, float32; 0 for an empty tree."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))
