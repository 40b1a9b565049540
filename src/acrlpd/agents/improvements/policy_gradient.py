"""Follow the critics' gradient through the denoising steps."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.improvements.base import Improvement, SampleWeights, View, check_smooth
from acrlpd.findings import Finding, warning
from acrlpd.models.families.base import PolicyConfig


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Improvement):
    """-Q of one sample of the policy, with a gradient through all of its Euler steps.

    Each step is computed again in the backward pass. This improvement needs the most memory, and trusts the critics
    where there is no data.
    """

    zero_at_best: ClassVar[bool] = False

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        steps = view.algorithm.acrlpd.sampling_steps
        noise = view.draws.candidate_noise[:, :1]
        actions = view.networks.policy.denoise(view.context, noise, num_steps=steps, remat=True)
        return -view.values(view.algorithm.clip(actions))[:, 0]

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        yield from check_smooth(self, model, "needs a gradient from the chunk to the policy")
        if frozen_backbone:
            yield warning(
                "policy_gradient with a frozen backbone moves only the action expert, through all "
                f"{hyperparams.sampling_steps} denoising steps: this takes much memory for little gain; use awr"
            )
