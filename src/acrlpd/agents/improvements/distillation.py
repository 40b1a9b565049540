"""A one-step policy, taught by the flow policy and by the critics: QC-FQL, and FQL where chunks have one step."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

import jax
import jax.numpy as jnp
from annotated_types import Ge, MinLen
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.hyperparams import ACRLPDHyperparams, NonNegative
from acrlpd.agents.improvements.base import (
    Improvement,
    SampleWeights,
    View,
    check_features,
    check_smooth,
    read_observation,
)
from acrlpd.agents.networks import Networks
from acrlpd.findings import Finding
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.mlp import MLP
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class Distillation(Improvement):
    """A network mu(s, z) makes a chunk from noise z in one step, and acts in place of the flow policy.

    The network stays close to the chunk that the flow policy makes from the same noise, and moves where the critics see
    more value. The flow policy itself is only cloned. So no gradient goes through the Euler steps, and neither targets
    nor acting compute Euler steps.
    """

    # Weight of the squared distance to the chunk of the flow policy (alpha in the papers). Higher: closer to the data.
    distillation_weight: NonNegative = 100.0
    # Hidden layers of the one-step policy.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512, 512)

    zero_at_best: ClassVar[bool] = False

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> "OneStepPolicy":
        return OneStepPolicy(self.hidden_dims, policy, rngs)

    def propose(
        self,
        networks: Networks,
        context: Context,
        observation: Observation,
        noise: jax.Array,
        denoise: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        return networks.own(OneStepPolicy)(context, observation, noise)

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        algorithm, noise = view.algorithm, view.draws.actor_noise[:, None]
        with jax.named_scope("sampling"):
            flow = view.fixed.policy.denoise(view.fixed_context, noise, num_steps=algorithm.acrlpd.sampling_steps)
        # The one-step policy reads the features of the flow policy, but does not train them.
        chunk = view.networks.own(OneStepPolicy)(view.fixed_context, view.batch.observations, noise)
        # The mean over the entries that the critics see. Other entries only follow the flow policy.
        num_seen = algorithm.critic_chunks(chunk).shape[-1]
        distance = jnp.sum(jnp.square(chunk - algorithm.clip(flow)), axis=(1, 2, 3)) / num_seen
        return self.distillation_weight * distance - view.values(algorithm.clip(chunk))[:, 0]

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        yield from check_smooth(self, model, "learns the map from noise to chunks, which must be smooth")
        yield from check_features(self, model, critic)


class OneStepPolicy(nnx.Module):
    """mu(s, z): an MLP over the mean of the policy's features, if the policy has any, the state and a chunk's noise."""

    def __init__(self, hidden_dims: tuple[int, ...], policy: FlowPolicy, rngs: nnx.Rngs):
        self.feature_dim = policy.feature_dim
        chunk_dim = policy.action_horizon * policy.action_dim
        dim_in = policy.feature_dim + policy.state_dim + chunk_dim
        self.mlp = MLP(dim_in, hidden_dims, chunk_dim, dtype=policy.dtype, rngs=rngs)

    def __call__(self, context: Context, observation: Observation, noise: jax.Array) -> jax.Array:
        """Chunks [b, n, T, a] from noise [b, n, T, a]."""
        b, n = noise.shape[:2]
        seen = read_observation(context, observation, self.feature_dim)
        seen = jnp.broadcast_to(seen[:, None], (b, n, seen.shape[-1]))
        inputs = jnp.concatenate([seen, noise.reshape(b, n, -1)], axis=-1)
        return self.mlp(inputs).astype(jnp.float32).reshape(noise.shape)
