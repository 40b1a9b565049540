"""Advantage-weighted regression: clone the logged actions, the better ones more."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Gt

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.improvements.base import Improvement, Info, SampleWeights, View, weight_metrics
from acrlpd.findings import Finding, warning
from acrlpd.models.families.base import PolicyConfig


@dataclasses.dataclass(frozen=True)
class AWR(Improvement):
    """W = min(exp(A / alpha), weight_clip) on the policy's own flow-matching losses.

    The weighted losses are those of cloning, so that the improvement costs no forward pass of its own.
    """

    clones_logged_actions = True

    # Largest weight exp(advantage / temperature) before normalisation. Lower: closer to cloning.
    weight_clip: Annotated[float, Gt(0)] = 100.0

    def weigh(self, view: View) -> SampleWeights:
        return SampleWeights(
            log_weight=log_awr_weight(view.advantage, view.temperature, self.weight_clip),
            size=jnp.sum(view.batch.valid, axis=1),
            kept={"advantage": view.advantage},
        )

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        return jnp.sum(view.flow_losses * view.batch.valid, axis=1)

    def metrics(self, weights: SampleWeights) -> Info:
        return weight_metrics(weights.kept["advantage"], weights.log_weight)

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        if hyperparams.num_action_samples == 1:
            yield warning("with num_action_samples 1 the advantage baseline is a single sample: noisy weights")


def log_awr_weight(advantage: jax.Array, temperature: jax.Array, clip: float) -> jax.Array:
    """log of exp(advantage / temperature), clipped from above."""
    return jnp.minimum(advantage / temperature, math.log(clip))
