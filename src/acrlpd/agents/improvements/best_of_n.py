"""Clone the best of N candidates."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from acrlpd.agents.best_of_n import take_candidate
from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.improvements.base import Improvement, SampleWeights, View, check_smooth, equal_weights
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig


@dataclasses.dataclass(frozen=True)
class CloneBestOfN(Improvement):
    """The flow-matching loss towards the candidate at s that the critics value most."""

    def weigh(self, view: View) -> SampleWeights:
        actions, values = view.candidates
        return equal_weights(view.batch, best=take_candidate(actions, jnp.argmax(values, axis=1)))

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        noise, time = view.draws.actor_noise, view.draws.actor_time
        losses = view.networks.policy.flow_matching_loss(view.context, weights.kept["best"], noise, time)
        return jnp.mean(losses, axis=1)

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        yield from check_smooth(self, model, "clones candidates, of which only actions are known")
        if hyperparams.num_action_samples == 1:
            yield error("improvement best_of_n with num_action_samples 1 clones the policy itself; use 2 or more")
