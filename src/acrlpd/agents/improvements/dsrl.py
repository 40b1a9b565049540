"""DSRL, noise-aliased: the flow policy is frozen, and a small actor chooses the noise that the policy starts from."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, MinLen
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig, ObservationReader
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, Positive
from acrlpd.agents.improvements.base import (
    Improvement,
    Info,
    SampleWeights,
    View,
    check_entropy,
    check_features,
    check_smooth,
    check_temperature,
    equal_weights,
    read_observation,
)
from acrlpd.agents.networks import Networks, TemperatureModule
from acrlpd.choice import kind_name
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy
from acrlpd.models.squashed_gaussian import SquashedGaussian

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class DSRL(Improvement):
    """An actor pi_z(z | s) over the noise z that the frozen policy turns into chunks.

    The critics learn values of chunks, as always. Noise critics Q_z(s, z) learn to predict the value of the chunk that
    the policy makes from z, so that the gradient of the actor does not go through the Euler steps. The actor follows
    the noise critics, and its temperature holds the entropy of z at a target, which is that of `acrlpd` for each row of
    noise.

    The noise critics learn at two noises for each observation: one of the actor, and one that is standard normal,
    clipped to the box [-noise_bound, noise_bound]. The paper has standard normal noise alone. If the box is small, much
    of such noise lies outside of the box, where the actor never is. If the box is large, no such noise lies in the
    corners of the box, where the actor may go. The actor's own noise makes the noise critics right wherever the actor
    is. The normal noise keeps the noise critics right where the actor may go next.

    What differs from the paper besides: targets have no entropy term (the paper's code for pi0 has none either); the
    noise critics predict one value, the aggregated value of the critics, and not the value of each critic; actor, noise
    critics and temperature learn with the critics' optimizer. They share one state of this optimizer, so the noise
    critics begin to learn with the actor, after a critic warm-up.
    """

    # Largest noise in each dim (b_w in the paper). The policy was trained with noise of standard deviation 1. Larger:
    # more reach, with noise that the policy hardly knows.
    noise_bound: Positive = 1.5
    # "one": the rows of a chunk share one row of noise, so that there is less to learn; "all": each row has its own.
    noise_rows: Literal["one", "all"] = "one"
    # Hidden layers of the actor and of the noise critics.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (256, 256, 256)

    zero_at_best: ClassVar[bool] = False
    freezes_policy: ClassVar[bool] = True

    def num_rows(self, action_horizon: int) -> int:
        """Rows of noise that the actor chooses for a chunk."""
        return 1 if self.noise_rows == "one" else action_horizon

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> "NoiseActor":
        return NoiseNetworks(self, policy, algorithm, rngs)

    def propose(
        self,
        networks: Networks,
        context: Context,
        observation: Observation,
        noise: jax.Array,
        denoise: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        chosen, _ = networks.own(NoiseActor).choose_noise(context, observation, noise)
        return denoise(self._for_all_rows(chosen, noise))

    def weigh(self, view: View) -> SampleWeights:
        # Two noises, and the values of their chunks. Nothing of this needs a gradient.
        chosen, log_prob = self.choose_noise(view, view.fixed)
        rows = chosen.shape[2]
        normal = jnp.clip(view.draws.flow_noise[:, None, :rows], -self.noise_bound, self.noise_bound)
        noise = jnp.concatenate([chosen, normal], axis=1)  # [b, 2, rows, a]
        steps = view.algorithm.acrlpd.sampling_steps
        with jax.named_scope("sampling"):
            everywhere = self._for_all_rows(noise, view.draws.flow_noise)
            chunks = view.fixed.policy.denoise(view.fixed_context, everywhere, num_steps=steps)
        own = view.fixed.own(NoiseNetworks)
        return equal_weights(
            view.batch,
            noise=noise,
            value=view.values(view.algorithm.clip(chunks)),  # [b, 2]
            predicted=own.values(view.fixed_context, view.batch.observations, noise),  # [b, 2]
            **self.actor_record(view, log_prob, rows),
        )

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        networks, fixed, kept = view.networks.own(NoiseNetworks), view.fixed.own(NoiseNetworks), weights.kept
        context, observations = view.fixed_context, view.batch.observations
        error = networks.member_values(context, observations, kept["noise"]) - kept["value"][..., None]
        follow = self.actor_losses(view, lambda noise: fixed.values(context, observations, noise))
        return follow + jnp.mean(jnp.square(error), axis=(1, 2))

    def actor_losses(self, view: View, values: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The loss of actor and temperature [b], where `values` judges noise: [b, 1, rows, a] -> [b, 1]."""
        chosen, log_prob = self.choose_noise(view, view.networks)
        hyperparams, (_, _, rows, dims) = view.algorithm.acrlpd, chosen.shape
        target_entropy = hyperparams.target_entropy
        if target_entropy is None:  # noise has the dims of the policy, not those of the robot
            target_entropy = -hyperparams.target_entropy_multiplier * dims
        temperature = view.networks.own(NoiseActor).temperature
        return temperature.actor_loss(log_prob, values(chosen)[:, 0], target_entropy * rows)

    def actor_record(self, view: View, log_prob: jax.Array, rows: int) -> dict[str, jax.Array]:
        """What `metrics` tells about the actor, for each sample: [b] each."""
        alpha = jnp.broadcast_to(view.fixed.own(NoiseActor).temperature(), log_prob.shape)
        return {"entropy_of_a_row": -log_prob / rows, "alpha": alpha}

    def metrics(self, weights: SampleWeights) -> Info:
        kept = weights.kept
        return self.actor_metrics(kept) | {
            "noise_gain": jnp.mean(kept["value"][:, 0] - kept["value"][:, 1]),
            "noise_critic_error": jnp.mean(jnp.abs(kept["predicted"] - kept["value"])),
        }

    def actor_metrics(self, kept: dict[str, jax.Array]) -> Info:
        """Metrics of `actor_record`, and of the actor's noise, which is kept["noise"][:, 0]."""
        return {
            "alpha_value": jnp.mean(kept["alpha"]),
            "entropy_estimate": jnp.mean(kept["entropy_of_a_row"]),
            "noise_size": jnp.sqrt(jnp.mean(jnp.square(kept["noise"][:, 0]))),
        }

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        yield from check_smooth(self, model, "steers the noise that chunks are made of")
        if model.has_density:
            yield error(
                f"improvement {kind_name(self)} chooses the noise of a flow, and the {kind_name(model)} policy is no "
                "flow: set model pi0 or state_flow, or choose improvement sac"
            )
        if hyperparams.loss_weights.bc_weight > 0:
            yield error(
                f"improvement {kind_name(self)} freezes the policy, so nothing can be cloned: set "
                f"acrlpd.loss_weights.bc_weight 0; found {hyperparams.loss_weights.bc_weight}"
            )
        if hyperparams.critic_gradient_to_policy:
            yield error(
                f"improvement {kind_name(self)} freezes the policy, so the critics cannot train its features: set "
                "acrlpd.critic_gradient_to_policy false"
            )
        yield from check_features(self, model, critic)
        yield from check_temperature(self, hyperparams)
        yield from check_entropy(self, hyperparams, model, self.noise_bound)

    def choose_noise(self, view: View, networks: Networks) -> tuple[jax.Array, jax.Array]:
        """Noise of the actor [b, 1, rows, a] and its log probability [b]."""
        noise = view.draws.actor_noise[:, None]
        chosen, log_prob = networks.own(NoiseActor).choose_noise(view.fixed_context, view.batch.observations, noise)
        return chosen, log_prob[:, 0]

    def _for_all_rows(self, noise: jax.Array, like: jax.Array) -> jax.Array:
        """Noise [b, n, 1 or T, a] for each row of a chunk, whose shape is that of `like` [..., T, a]: [b, n, T, a]."""
        return jnp.broadcast_to(noise, (*noise.shape[:2], *like.shape[-2:]))


class NoiseActor(nnx.Module):
    """The actor over noise and its temperature."""

    def __init__(self, config: DSRL, policy: FlowPolicy, algorithm: "Algorithm", rngs: nnx.Rngs):
        self.feature_dim, self.noise_bound = policy.feature_dim, config.noise_bound
        self.rows = config.num_rows(policy.action_horizon)
        noise_dim = self.rows * policy.action_dim
        dim_in = policy.feature_dim + policy.state_dim
        self.actor = SquashedGaussian(dim_in, config.hidden_dims, noise_dim, dtype=policy.dtype, rngs=rngs)
        self.temperature = TemperatureModule(algorithm.acrlpd.initial_temperature)

    def choose_noise(self, context: Context, observation: Observation, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Noise [b, n, rows, a] in the box from standard normal noise [b, n, T, a], and log probabilities [b, n]."""
        drawn = noise[:, :, : self.rows]
        seen = read_observation(context, observation, self.feature_dim)[:, None]
        chosen, log_prob = self.actor.sample(seen, drawn.reshape(*drawn.shape[:2], -1))
        log_prob = jnp.sum(log_prob - jnp.log(self.noise_bound), axis=-1)
        return self.noise_bound * chosen.reshape(drawn.shape), log_prob


class NoiseNetworks(NoiseActor):
    """The actor over noise, its temperature and the noise critics."""

    num_critics = 2

    def __init__(self, config: DSRL, policy: FlowPolicy, algorithm: "Algorithm", rngs: nnx.Rngs):
        super().__init__(config, policy, algorithm, rngs)
        # The features of attention would outweigh noise of a few dims.
        critics = MLPCritics(
            num_critics=self.num_critics, hidden_dims=config.hidden_dims, q_aggregation="mean", pooling="mean"
        )
        reader = ObservationReader(critics, feature_dim=policy.feature_dim, image_keys=(), rngs=rngs)
        noise_dim = self.rows * policy.action_dim
        self.critics = critics.create(reader=reader, state_dim=policy.state_dim, chunk_dim=noise_dim, rngs=rngs)

    def member_values(self, context: Context, observation: Observation, noise: jax.Array) -> jax.Array:
        """Values of noise [b, n, rows, a] by every noise critic: [b, n, members]."""
        return self.critics(context.features, observation, noise.reshape(*noise.shape[:2], -1))

    def values(self, context: Context, observation: Observation, noise: jax.Array) -> jax.Array:
        """Values of noise [b, n, rows, a]: [b, n]."""
        return self.critics.aggregate(self.member_values(context, observation, noise))
