"""What an update reports: scalars of the whole batch, made from per-sample records."""

import jax
import jax.numpy as jnp
import optax

from acrlpd.agents.joint_loss import Record
from acrlpd.agents.loss_functions import Algorithm, Normalizers
from acrlpd.batch import Batch

Info = dict[str, jax.Array]


def loss_info(algorithm: Algorithm, batch: Batch, record: Record, norm: Normalizers, alpha: jax.Array) -> Info:
    """Losses and statistics; q and TD statistics are over the windows the critic may learn from."""
    mask = batch.sequence_mask
    q = jnp.mean(record.q, axis=-1)
    q_mean = jnp.sum(q * mask) / norm.critic
    target_mean = jnp.sum(record.targets.value * mask) / norm.critic
    td_error = jnp.mean(jnp.abs(record.q - record.targets.value[:, None]), axis=-1)
    awr = algorithm.has_actor_loss and algorithm.acrlpd.actor_loss == "awr"
    entropy = jnp.mean(record.targets.entropy)
    learned_alpha = algorithm.acrlpd.learnable_temperature
    info = {
        "critic_loss": jnp.sum(record.td_loss * mask) / norm.critic,
        "actor_loss": jnp.sum(record.actor_loss) / (norm.awr if awr else norm.samples),
        "bc_loss": jnp.sum(record.bc_loss) / norm.bc,
        "alpha_loss": alpha * (entropy - algorithm.target_entropy) * learned_alpha,
        "q_mean": q_mean,
        "q_std": jnp.sqrt(jnp.sum(jnp.square(q - q_mean) * mask) / norm.critic),
        "q_ensemble_std": jnp.sum(jnp.std(record.q, axis=-1) * mask) / norm.critic,
        "target_q_mean": target_mean,
        "td_error_mean": jnp.sum(td_error * mask) / norm.critic,
        "alpha_value": alpha,
        "entropy_estimate": entropy,
        "valid_samples": jnp.sum(mask),
        "mask_ratio": jnp.mean(mask),
        "valid_step_ratio": jnp.mean(batch.valid),
        "bootstrap_ratio": jnp.sum(batch.masks[:, -1] * mask) / norm.critic,
        "best_of_n_gain": jnp.mean(record.targets.best_q - record.targets.mean_q),
        "candidate_diversity": jnp.mean(record.targets.diversity),
    }
    if algorithm.needs_advantage:
        info |= _weight_info(record, norm)
    return info


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


def global_norm(tree: object) -> jax.Array:
    """L2 norm over all leaves, float32; 0 for an empty tree."""
    return jnp.asarray(optax.global_norm(tree), jnp.float32)
