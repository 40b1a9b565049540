"""What an update reports: scalars of the whole batch, made from the records of its samples."""

from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from acrlpd.agents.backups.base import NextCandidates, Targets
from acrlpd.agents.improvements.base import Info, weight_metrics
from acrlpd.agents.temperature import choice_entropy
from acrlpd.batch import Batch
from acrlpd.models.observation import Array

if TYPE_CHECKING:
    from acrlpd.agents.agent import Agent
    from acrlpd.agents.algorithm import Algorithm, Normalizers, Weights


# The value of a metric that an update did not compute, where the other updates of a compiled loop compute the metric.
# This number is finite, because monitoring must see infinite values.
NOT_COMPUTED = float(jnp.finfo(jnp.float32).min)


class SampleRecord(flax.struct.PyTreeNode):
    """Results of each sample, from which losses and metrics are reported. None means that a result was not computed."""

    q: jax.Array | None = None  # [b, E] at the logged chunk
    td_loss: jax.Array | None = None  # [b]
    backup: jax.Array | None = None  # [b] of the backup's own networks
    temperature: jax.Array | None = None  # [b]
    cloning: jax.Array | None = None  # [b] weighted, before the sum is divided
    improvement: jax.Array | None = None  # [b]
    judge: jax.Array | None = None  # [b] of the improvement's networks that judge


def loss_info(
    algorithm: "Algorithm",
    batch: Batch,
    record: SampleRecord,
    weights: "Weights",
    norm: "Normalizers",
    targets: Targets | None,
    alpha: jax.Array,
) -> Info:
    """Losses and statistics of what was computed; an update of the critics alone has no loss of the policy."""
    info = {
        "alpha_value": alpha,
        "valid_samples": jnp.sum(batch.sequence_mask),
        "mask_ratio": jnp.mean(batch.sequence_mask),
        "valid_step_ratio": jnp.mean(batch.valid),
        "reward_mean": _mean_reward(batch),
        "reward_min": jnp.min(batch.rewards),
        "reward_max": jnp.max(batch.rewards),
    }
    if targets is not None:
        info |= _critic_info(batch, record, norm, targets)
    if targets is not None and targets.candidates is not None:
        info |= _candidate_info(targets.candidates)
        if record.temperature is not None:
            entropy = choice_entropy(targets.candidates.values, jnp.broadcast_to(alpha, record.temperature.shape))
            info |= {"alpha_loss": jnp.mean(record.temperature), "choice_entropy": jnp.mean(entropy)}
    if weights.cloning is not None and record.cloning is not None:
        info["bc_loss"] = jnp.sum(record.cloning)
        if algorithm.acrlpd.policy_data != "all":
            info["policy_data_ratio"] = jnp.mean(jnp.isfinite(weights.cloning.log_weight))
        if algorithm.acrlpd.bc_importance_weighting:
            info |= weight_metrics(weights.cloning)
        info["actor_loss"] = jnp.zeros(())
    if weights.improvement is not None and record.improvement is not None:
        info["actor_loss"] = jnp.sum(record.improvement)
        info |= algorithm.improvement.metrics(weights.improvement)
    if record.judge is not None:
        info["judge_loss"] = jnp.mean(record.judge)
    return info


def _mean_reward(batch: Batch) -> jax.Array:
    """The mean reward of a recorded step. With n-step returns `valid` knows fewer steps than there are rewards."""
    steps, known = batch.rewards.shape[1], batch.valid.shape[1]
    if known < steps:  # The windows that the critics may learn from have rewards at nearly all steps.
        rewards = jnp.sum(batch.rewards * batch.sequence_mask[:, None])
        return rewards / jnp.maximum(steps * jnp.sum(batch.sequence_mask), 1.0)
    return jnp.sum(batch.rewards) / jnp.maximum(jnp.sum(batch.valid[:, :steps]), 1.0)


def _candidate_info(candidates: NextCandidates) -> Info:
    q = candidates.values
    return {
        "best_of_n_gain": jnp.mean(jnp.max(q, axis=1) - jnp.mean(q, axis=1)),
        "candidate_q_std": jnp.mean(jnp.std(q, axis=1)),
        "candidate_diversity": jnp.mean(candidates.diversity),
    }


def _critic_info(batch: Batch, record: SampleRecord, norm: "Normalizers", targets: Targets) -> Info:
    """Over the windows that the critics may learn from."""

    def mean(x: Array) -> jax.Array:
        return jnp.sum(x * batch.critic_weight) / norm.critic

    assert record.q is not None and record.td_loss is not None
    q, target = jnp.mean(record.q, axis=-1), targets.value
    own = {} if record.backup is None else {"backup_loss": mean(record.backup)}
    return own | {
        "critic_loss": mean(record.td_loss),
        "q_mean": mean(q),
        "q_std": jnp.sqrt(mean(jnp.square(q - mean(q)))),
        "q_ensemble_std": mean(jnp.std(record.q, axis=-1)),
        "target_q_mean": mean(target),
        "td_error_mean": mean(jnp.mean(jnp.abs(record.q - target[:, None]), axis=-1)),
        "bootstrap_ratio": mean(batch.masks[:, -1]),
    }


def update_info(old: "Agent", new: "Agent", norms: dict[str, jax.Array], finite: jax.Array) -> Info:
    """Norms, learning rates and counters of an update that has been applied."""
    absent = [name for name in ("improvement", "backup") if not getattr(old, name).learns]
    norms = {name: norm for name, norm in norms.items() if name not in absent}
    weights = {"bc_weight": old.loss_weights.bc_weight}
    if old.algorithm.has_improvement:
        weights["actor_weight"] = old.loss_weights.actor_weight
    return {
        **{f"{name}_grad_norm": norm for name, norm in norms.items()},
        "policy_param_norm": global_norm(new.policy_params),
        "critic_param_norm": global_norm(new.critics.online),
        "policy_lr": old.policy_optimizer.learning_rate(old.policy_opt_state),
        "critic_lr": old.critic_optimizer.learning_rate(old.critic_opt_state),
        "temperature_lr": old.temperature_optimizer.learning_rate(old.temperature_opt_state),
        **{name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()},
        "update_skipped": 1.0 - finite.astype(jnp.float32),
        "skipped_updates": new.skipped_updates,
    }


def global_norm(tree: Any) -> jax.Array:
    """L2 norm over all leaves, float32; 0 for an empty tree."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))
