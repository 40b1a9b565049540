"""DSRL by SAC: as `dsrl`, but the critics themselves judge noise, and learn from what the policy has played."""

import dataclasses
from typing import TYPE_CHECKING

import jax
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.improvements.base import Info, SampleWeights, View, equal_weights
from acrlpd.agents.improvements.dsrl import DSRL, NoiseActor
from acrlpd.agents.networks import Networks
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class DSRLSAC(DSRL):
    """Soft actor-critic whose action is the noise z of a whole chunk, which the frozen policy turns into H actions.

    Critics Q(s, z) learn from the rewards of the H steps and from Q(s', z') with z' of the actor at s'. An update
    denoises nothing. The price is that only chunks whose noise is known can be learned from: those that the policy has
    played itself. `dsrl` judges chunks, so demonstrations teach its critics as well.

    What differs from the paper's code for pi0: rewards and discount count steps and not chunks; actor and temperature
    learn with the critics' optimizer. As there, targets have no entropy term.
    """

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> NoiseActor:
        return NoiseActor(self, policy, algorithm, rngs)

    def noise_dim(self, model: PolicyConfig) -> int:
        return self.num_rows(model.action_horizon) * model.action_dim

    def judged_noise(
        self, networks: Networks, context: Context, observation: Observation, noise: jax.Array
    ) -> jax.Array:
        chosen, _ = networks.own(NoiseActor).choose_noise(context, observation, noise)
        return _flat(chosen)

    def weigh(self, view: View) -> SampleWeights:
        # For the metrics. Without micro-batches, the compiler computes this noise and that of `losses` once.
        chosen, log_prob = self.choose_noise(view, view.fixed)
        return equal_weights(view.batch, noise=chosen, **self.actor_record(view, log_prob, chosen.shape[2]))

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        critics, features = view.fixed.critics.online_ensemble, view.fixed_context.features

        def values(noise: jax.Array) -> jax.Array:
            return critics.aggregate(critics(features, view.batch.observations, _flat(noise)))

        return self.actor_losses(view, values)

    def metrics(self, weights: SampleWeights) -> Info:
        return self.actor_metrics(weights.kept)


def _flat(noise: jax.Array) -> jax.Array:
    """Noise [b, n, rows, a] as critics see it: [b, n, rows * a]."""
    return noise.reshape(*noise.shape[:2], -1)
