"""Soft actor-critic: follow the critics, and stay as random as a target entropy asks. RLPD's way to improve."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.improvements.base import (
    Improvement,
    Info,
    SampleWeights,
    View,
    check_entropy,
    check_temperature,
    equal_weights,
)
from acrlpd.agents.networks import TemperatureModule
from acrlpd.choice import kind_name
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.policy import FlowPolicy

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class SAC(Improvement):
    """alpha log pi(c | s) - Q(s, c) of one chunk c of the policy, with a temperature alpha that learns.

    alpha belongs to this improvement, because the entropy -log pi(c | s) of the policy itself steers alpha. The values
    of candidates steer the learned temperature of `acrlpd`. The initial value and the target entropy, which is
    a number for each step of a chunk, are those of `acrlpd`.
    """

    zero_at_best: ClassVar[bool] = False

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> TemperatureModule:
        return TemperatureModule(algorithm.acrlpd.initial_temperature)

    def weigh(self, view: View) -> SampleWeights:
        # For the metrics. Without micro-batches, the compiler computes this chunk and that of `losses` once.
        _, log_prob = view.fixed.policy.sample_with_log_prob(view.fixed_context, view.draws.actor_noise[:, None])
        alpha = jnp.broadcast_to(view.fixed.own(TemperatureModule)(), log_prob.shape[:1])
        steps = view.batch.actions.shape[1]
        return equal_weights(view.batch, entropy_of_a_step=-log_prob[:, 0] / steps, alpha=alpha)

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        chunk, log_prob = view.networks.policy.sample_with_log_prob(view.context, view.draws.actor_noise[:, None])
        target_entropy = view.algorithm.target_entropy * chunk.shape[2]
        value = view.values(view.algorithm.clip(chunk))[:, 0]
        return view.networks.own(TemperatureModule).actor_loss(log_prob[:, 0], value, target_entropy)

    def metrics(self, weights: SampleWeights) -> Info:
        kept = weights.kept
        return {"alpha_value": jnp.mean(kept["alpha"]), "entropy_estimate": jnp.mean(kept["entropy_of_a_step"])}

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        if not model.has_density:
            yield error(
                f"improvement sac needs the probability of a chunk, which the {kind_name(model)} policy cannot say: "
                "set model gaussian, or choose another improvement"
            )
        yield from check_temperature(self, hyperparams)
        yield from check_entropy(self, hyperparams, model, 1.0)
