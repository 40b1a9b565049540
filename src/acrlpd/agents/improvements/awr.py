"""Advantage-weighted regression: clone the logged actions, the better ones more."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from annotated_types import Gt, Interval

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.improvements.base import Improvement, Info, SampleWeights, View, weight_metrics
from acrlpd.agents.temperature import effective_share, over_spread, solve_alpha
from acrlpd.findings import Finding, error, warning
from acrlpd.models.families.base import PolicyConfig


@dataclasses.dataclass(frozen=True)
class AWR(Improvement):
    """W = exp(A / alpha) on the policy's own flow-matching losses.

    The weighted losses are those of cloning, so that the improvement costs no forward pass of its own. How sharp the
    weights are does not depend on how long a run has lasted, nor on the scale of the rewards.
    """

    clones_logged_actions: ClassVar[bool] = True

    # The effective share of the B windows of a batch that the policy is cloned from, (sum W)^2 / (B sum W^2): every
    # update solves for the alpha of this share. Lower: fewer, better windows count. None: alpha is `temperature`.
    effective_share: Annotated[float | None, Interval(gt=0, lt=1)] = 0.3
    # alpha in units of the standard deviation of the batch's advantages, where effective_share is None. None: alpha is
    # the temperature of `acrlpd`, fixed or learned, in units of the critics' values.
    temperature: Annotated[float | None, Gt(0)] = None
    # Largest weight exp(A / alpha) before normalisation, where effective_share is None. Lower: closer to cloning.
    weight_clip: Annotated[float, Gt(0)] = 100.0

    def weigh(self, view: View) -> SampleWeights:
        return SampleWeights(
            log_weight=log_weight_of_judged(view, self.weight_clip),
            size=jnp.sum(view.batch.valid, axis=1),
            kept={"advantage": view.advantage, "judged": jnp.asarray(view.batch.sequence_mask)},
        )

    def balance(self, weights: SampleWeights) -> SampleWeights:
        counts = weights.log_weight != -jnp.inf
        advantage = jnp.where(counts, over_spread(weights.kept["advantage"], counts), -jnp.inf)
        if self.effective_share is not None:
            alpha = solve_alpha(lambda alpha: effective_share(advantage / alpha), self.effective_share, ())
            log_weight = advantage / alpha
            log_mean = jax.nn.logsumexp(log_weight) - jnp.log(jnp.sum(counts))
            log_weight -= jnp.where(jnp.any(counts), log_mean, 0.0)  # the weights that count have the mean 1
        elif self.temperature is not None:
            log_weight = log_awr_weight(advantage, jnp.asarray(self.temperature), self.weight_clip)
        else:
            return weights
        return dataclasses.replace(weights, log_weight=log_weight)

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        return jnp.sum(view.flow_losses * view.batch.valid, axis=1)

    def metrics(self, weights: SampleWeights) -> Info:
        return weight_metrics(weights)

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        if self.temperature is not None and self.effective_share is not None:
            yield error(
                f"improvement.temperature {self.temperature} has no effect while improvement.effective_share "
                f"{self.effective_share} decides how sharp the weights are: set one of the two to none"
            )
        if hyperparams.num_action_samples == 1:
            yield warning(
                "with num_action_samples 1 the advantage baseline is a single sample, unless the backup has a value of "
                "its own: noisy weights"
            )


def log_weight_of_judged(view: View, clip: float) -> jax.Array:
    """`log_awr_weight` [b] with the advantages and the temperature of an update.

    Windows that the critics may not judge do not count: an advantage of 0 would be high where most are negative.
    """
    judged = jnp.asarray(view.batch.sequence_mask) > 0
    return jnp.where(judged, log_awr_weight(view.advantage, view.temperature, clip), -jnp.inf)


def log_awr_weight(advantage: jax.Array, temperature: jax.Array, clip: float) -> jax.Array:
    """log of exp(advantage / temperature), clipped from above."""
    return jnp.minimum(advantage / temperature, math.log(clip))
