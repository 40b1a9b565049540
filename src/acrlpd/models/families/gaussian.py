"""The policy of SAC and RLPD: a Gaussian over action chunks, squashed into (-1, 1), for low-dimensional tasks."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.policy import DENOISE, Context
from acrlpd.models.squashed_gaussian import SquashedGaussian
from acrlpd.models.state_policy import StatePolicy, StatePolicyConfig

# Logged actions come no closer than this to -1 and 1, where the density of a squashed Gaussian is not finite.
_MARGIN = 1e-5


@dataclasses.dataclass(frozen=True)
class GaussianPolicyConfig(StatePolicyConfig):
    """A tanh-Gaussian over whole action chunks, for low-dimensional benchmarks. Actions must lie in [-1, 1]."""

    has_density: ClassVar[bool] = True

    @property
    def use_quantile_norm(self) -> bool:
        """Quantiles bring most actions into the range that this policy can reach."""
        return True

    def create(self, rng: jax.Array) -> "GaussianPolicy":
        """A freshly initialised policy."""
        return GaussianPolicy(self, rngs=nnx.Rngs(rng))


class GaussianPolicy(StatePolicy):
    """The chunk is tanh(mean(s) + deviation(s) * noise): a function of noise, like the chunk of a flow, in one step."""

    def __init__(self, config: GaussianPolicyConfig, rngs: nnx.Rngs):
        super().__init__(config)
        chunk_dim = config.action_horizon * config.action_dim
        self.chunk = SquashedGaussian(config.state_dim, config.hidden_dims, chunk_dim, dtype=config.dtype, rngs=rngs)

    @jax.named_scope(DENOISE)
    def denoise(self, context: Context, noise: jax.Array, *, num_steps: int = 10, remat: bool = False) -> jax.Array:
        """Chunks from noise [b, n, T, a], in one step: nothing depends on `num_steps` and `remat`."""
        chunks, _ = self.chunk.sample(context.memory[:, None], self._flat(noise))
        return chunks.reshape(noise.shape)

    def velocity(self, context: Context, x_t: jax.Array, time: jax.Array) -> jax.Array:
        """The straight flow from noise to its chunk: one Euler step from t = 1 gives the chunk."""
        return x_t - self.denoise(context, x_t)

    def flow_matching_loss(self, context: Context, actions: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        """The policy's loss of cloning, which is no flow matching here: [b, T], whose mean over T is -log pi(actions).

        noise and time are not used.
        """
        actions = jnp.clip(actions, -1 + _MARGIN, 1 - _MARGIN)
        density = self.chunk.log_density(context.memory, self._flat(actions)).reshape(actions.shape)
        return -self.action_horizon * jnp.sum(density, axis=-1)

    def sample_with_log_prob(self, context: Context, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks, density = self.chunk.sample(context.memory[:, None], self._flat(noise))
        return chunks.reshape(noise.shape), jnp.sum(density, axis=-1)

    def _flat(self, chunks: jax.Array) -> jax.Array:
        """Chunks [..., T, a] as vectors."""
        self.refuse_other_chunks(chunks)
        return chunks.reshape(*chunks.shape[:-2], -1)
