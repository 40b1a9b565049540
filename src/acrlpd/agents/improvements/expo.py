"""EXPO: a small policy edits the chunks of the flow policy, and the critics choose among chunks and edited chunks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

import jax
import jax.numpy as jnp
from annotated_types import Ge, MinLen
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams, Positive
from acrlpd.agents.improvements.base import (
    Improvement,
    Info,
    SampleWeights,
    View,
    check_entropy,
    check_features,
    check_temperature,
    equal_weights,
    read_observation,
)
from acrlpd.agents.networks import Networks, TemperatureModule
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy
from acrlpd.models.squashed_gaussian import SquashedGaussian

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class EXPO(Improvement):
    """Half of the candidates are chunks c of the flow policy, the other half are c + edit_scale u with u ~ pi_u(s, c).

    The edit policy pi_u is a squashed Gaussian that follows the critics, so u lies in (-1, 1). It learns to edit logged
    chunks, as in EXPO-FT, which costs no Euler steps. The flow policy itself is only cloned, so it stays stable, and
    the choice among both kinds of candidates protects against edits that are bad.

    The temperature of pi_u holds the entropy of u at a target, which is that of `acrlpd` for each step that the critics
    see. The entropy of edit_scale u would need another target: with an edit_scale of 0.2 even uniform edits have an
    entropy of -0.92 for each dim, so a target of -0.5 would raise the temperature for ever.

    What differs from EXPO-FT: the critics choose by `critic.q_aggregation` of all online critics, there by the minimum
    of two random target critics.
    """

    # Largest edit of an entry of a chunk, in the units of the policy's actions. Larger: more reach beyond the data, and
    # more trust in critics where they have seen nothing.
    edit_scale: Positive = 0.2
    # Hidden layers of the edit policy.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (256, 256, 256)

    zero_at_best: ClassVar[bool] = False

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> "EditNetworks":
        return EditNetworks(self, policy, algorithm, rngs)

    def propose(
        self,
        networks: Networks,
        context: Context,
        observation: Observation,
        noise: jax.Array,
        denoise: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Candidate 2 i + 1 is the edited candidate 2 i, so that the first n of N candidates do not depend on N.

        With an odd number of candidates, which only acting may ask for, the last chunk has no edited twin.
        """
        chunks = denoise(noise[:, ::2])
        num_edited = noise.shape[1] // 2
        edits, _ = networks.own(EditNetworks).edit(context, observation, chunks[:, :num_edited], noise[:, 1::2])
        edited = self._edited(chunks[:, :num_edited], edits)
        pairs = jnp.stack([chunks[:, :num_edited], edited], axis=2)
        pairs = pairs.reshape(noise.shape[0], 2 * num_edited, *noise.shape[2:])
        return jnp.concatenate([pairs, chunks[:, num_edited:]], axis=1)

    def weigh(self, view: View) -> SampleWeights:
        # For the metrics. Without micro-batches, the compiler computes this edit and that of `losses` once.
        edited, edits, log_prob = self._edit_logged(view, view.fixed)
        logged = jnp.asarray(view.batch.actions)[:, None]
        values = _mean_values(view, jnp.concatenate([logged, edited], axis=1))  # [b, 2]
        steps = view.algorithm.qchunking.chunk_length
        return equal_weights(
            view.batch,
            gain=values[:, 1] - values[:, 0],
            norm=self.edit_scale * jnp.linalg.norm(edits.reshape(edits.shape[0], -1), axis=-1),
            entropy_of_a_step=-log_prob / steps,
            alpha=jnp.broadcast_to(view.fixed.own(EditNetworks).temperature(), log_prob.shape),
        )

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        edited, _, log_prob = self._edit_logged(view, view.networks)
        target_entropy = view.algorithm.target_entropy * view.algorithm.qchunking.chunk_length
        value = _mean_values(view, edited)[:, 0]
        return view.networks.own(EditNetworks).temperature.actor_loss(log_prob, value, target_entropy)

    def metrics(self, weights: SampleWeights) -> Info:
        kept = weights.kept
        return {
            "alpha_value": jnp.mean(kept["alpha"]),
            "entropy_estimate": jnp.mean(kept["entropy_of_a_step"]),
            "edit_norm": jnp.mean(kept["norm"]),
            "edit_gain": jnp.mean(kept["gain"]),
            "edit_wins": jnp.mean(kept["gain"] > 0),
        }

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        n = hyperparams.num_action_samples
        if n % 2:
            yield error(
                "improvement expo edits every chunk of the policy, so that half of the candidates are edited: "
                f"acrlpd.num_action_samples must be even; found {n}. Use {n + 1}"
            )
        yield from check_features(self, model, critic)
        yield from check_temperature(self, hyperparams)
        yield from check_entropy(self, hyperparams, model, 1.0)

    def _edit_logged(self, view: View, networks: Networks) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Edited logged chunks [b, 1, T, a], the edits [b, 1, C, real dims] and their log probabilities [b]."""
        logged, noise = jnp.asarray(view.batch.actions)[:, None], view.draws.actor_noise[:, None]
        edits, log_prob = networks.own(EditNetworks).edit(view.fixed_context, view.batch.observations, logged, noise)
        return view.algorithm.clip(self._edited(logged, edits)), edits, log_prob[:, 0]

    def _edited(self, chunks: jax.Array, edits: jax.Array) -> jax.Array:
        steps, dims = edits.shape[-2:]
        return chunks.at[..., :steps, :dims].add(self.edit_scale * edits)


class EditNetworks(nnx.Module):
    """The edit policy, which sees and edits what the critics see of a chunk, and its temperature."""

    def __init__(self, config: EXPO, policy: FlowPolicy, algorithm: "Algorithm", rngs: nnx.Rngs):
        self.feature_dim = policy.feature_dim
        self.steps, self.dims = algorithm.qchunking.chunk_length, algorithm.qchunking.action_dim
        dim_out = self.steps * self.dims
        dim_in = policy.feature_dim + policy.state_dim + dim_out
        self.policy = SquashedGaussian(dim_in, config.hidden_dims, dim_out, dtype=policy.dtype, rngs=rngs)
        self.temperature = TemperatureModule(algorithm.acrlpd.initial_temperature)

    def edit(
        self, context: Context, observation: Observation, chunks: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Edits [b, n, C, real dims] of chunks [b, n, T, a] from noise [b, n, T, a], and log probabilities [b, n]."""
        b, n = chunks.shape[:2]
        flat = (b, n, self.steps * self.dims)
        chunk, noise = (x[..., : self.steps, : self.dims].reshape(flat) for x in (chunks, noise))
        seen = read_observation(context, observation, self.feature_dim)
        seen = jnp.broadcast_to(seen[:, None], (b, n, seen.shape[-1]))
        edits, log_prob = self.policy.sample(jnp.concatenate([seen, chunk], axis=-1), noise)
        return edits.reshape(b, n, self.steps, self.dims), jnp.sum(log_prob, axis=-1)


def _mean_values(view: View, actions: jax.Array) -> jax.Array:
    """The mean over all online critics of the values of actions [b, n, T, a]: [b, n]. The actions alone get gradients.

    A minimum over ten critics would hold the edits back where any one critic doubts.
    """
    critics, chunks = view.fixed.critics.online_ensemble, view.algorithm.critic_chunks(actions)
    return jnp.mean(critics(view.fixed_context.features, view.batch.observations, chunks), axis=-1)
