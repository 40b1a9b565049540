"""The policy of SAC and RLPD: a Gaussian over action chunks, squashed into (-1, 1), for low-dimensional tasks."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, MinLen
from flax import nnx

from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.mlp import MLP
from acrlpd.models.observation import Observation
from acrlpd.models.policy import DENOISE, Context, FlowPolicy

# Bounds of RLPD's log standard deviations, before the chunk is squashed.
_LOG_STD_BOUNDS = (-20.0, 2.0)
# Logged actions come no closer than this to -1 and 1, where the density of a squashed Gaussian is not finite.
_MARGIN = 1e-5


@dataclasses.dataclass(frozen=True)
class GaussianPolicyConfig(PolicyConfig):
    """A tanh-Gaussian over whole action chunks, for low-dimensional benchmarks. Actions must lie in [-1, 1]."""

    has_density: ClassVar[bool] = True

    # Compute precision; parameters are float32.
    dtype: Literal["bfloat16", "float32"] = "float32"
    # Real state and action dims: nothing is padded here.
    state_dim: Annotated[int, Ge(1)] = 28
    action_dim: Annotated[int, Ge(1)] = 5
    # Steps in one action chunk.
    action_horizon: Annotated[int, Ge(1)] = 5
    # Hidden layers.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512, 512)

    @property
    def use_quantile_norm(self) -> bool:
        """Quantiles bring most actions into the range that this policy can reach."""
        return True

    def create(self, rng: jax.Array) -> "GaussianPolicy":
        """A freshly initialised policy."""
        return GaussianPolicy(self, rngs=nnx.Rngs(rng))


class GaussianPolicy(FlowPolicy):
    """The chunk is tanh(mean(s) + deviation(s) * noise): a function of noise, like the chunk of a flow, in one step.

    The critics see the state itself, so they get no features (`feature_dim` is 0).
    """

    def __init__(self, config: GaussianPolicyConfig, rngs: nnx.Rngs):
        super().__init__(config)
        chunk_dim = config.action_horizon * config.action_dim
        *before, width = config.hidden_dims
        self.hidden = MLP(config.state_dim, tuple(before), width, activation=nnx.relu, dtype=config.dtype, rngs=rngs)
        self.mean_out = MLP(width, (), chunk_dim, dtype=config.dtype, rngs=rngs)
        self.log_std_out = MLP(width, (), chunk_dim, dtype=config.dtype, rngs=rngs)

    def encode(self, observation: Observation, *, features: bool = True) -> Context:
        state = jnp.asarray(observation.state)
        if state.shape[-1] != self.state_dim:
            raise ValueError(f"state must be [b, {self.state_dim}]; found {state.shape}")
        no_features = jnp.zeros((state.shape[0], 0), jnp.float32) if features else None
        return Context(features=no_features, memory=state.astype(self.dtype))

    @jax.named_scope(DENOISE)
    def denoise(self, context: Context, noise: jax.Array, *, num_steps: int = 10, remat: bool = False) -> jax.Array:
        """Chunks from noise [b, n, T, a], in one step: nothing depends on `num_steps` and `remat`."""
        mean, log_std = self._distribution(context, noise)
        return jnp.tanh(mean + jnp.exp(log_std) * noise)

    def velocity(self, context: Context, x_t: jax.Array, time: jax.Array) -> jax.Array:
        """The straight flow from noise to its chunk: one Euler step from t = 1 gives the chunk."""
        return x_t - self.denoise(context, x_t)

    def flow_matching_loss(self, context: Context, actions: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        """The policy's loss of cloning, which is no flow matching here: [b, T], whose mean over T is -log pi(actions).

        noise and time are not used.
        """
        actions = jnp.clip(actions, -1 + _MARGIN, 1 - _MARGIN)
        mean, log_std = self._distribution(context, actions[:, None])
        before = jnp.arctanh(actions)[:, None]
        density = _log_density(before, (before - mean) * jnp.exp(-log_std), log_std)
        return -self.action_horizon * jnp.sum(density[:, 0], axis=-1)

    def sample_with_log_prob(self, context: Context, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = self._distribution(context, noise)
        before = mean + jnp.exp(log_std) * noise
        return jnp.tanh(before), jnp.sum(_log_density(before, noise, log_std), axis=(-2, -1))

    def _distribution(self, context: Context, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and log standard deviation before the squashing, [b, 1, T, a] each, for chunks [b, n, T, a]."""
        self.refuse_other_chunks(chunks)
        x = nnx.relu(self.hidden(context.memory))
        shape = (x.shape[0], 1, self.action_horizon, self.action_dim)
        mean, log_std = (out(x).astype(jnp.float32).reshape(shape) for out in (self.mean_out, self.log_std_out))
        return mean, jnp.clip(log_std, *_LOG_STD_BOUNDS)


def _log_density(before: jax.Array, noise: jax.Array, log_std: jax.Array) -> jax.Array:
    """log density of tanh(u) in each dim, for u = mean + deviation * noise.

    log(1 - tanh(u)^2) is written with softplus, because 1 - tanh(u)^2 is 0 in float32 for |u| above 9.
    """
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * jnp.log(2 * jnp.pi)
    return normal - 2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))
