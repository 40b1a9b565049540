"""What every policy has in common: flow matching over action chunks, against one shared context.

A policy is two pieces. `encode` does the expensive work that depends on the observation alone (for
pi0: SigLIP and the 2B expert) and returns a `Context`. `velocity` predicts the flow for any number
of noisy chunks per observation against that context. Losses, single samples and best-of-N
candidates are written here, once, in terms of the two pieces. A caller that needs several of them for
the same observation pays for the context once.

A policy that is no flow is a function of noise all the same, and overrides `flow_matching_loss` and `denoise`.

Flow convention, as in openpi: t = 1 is noise, t = 0 is data; x_t = t * noise + (1 - t) * actions.
"""

import abc
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.augmentation import AugmentationLevel
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import Array, Observation, preprocess_observation

# Named scopes, by which the plan tells the work of the policy from the work of the critics.
ENCODE = "encode"
DENOISE = "denoise"


@flax.struct.dataclass
class Features:
    """What a policy has seen in an observation: tokens, of which the first `length` are no padding."""

    tokens: jax.Array  # [b, s, d], in the policy's dtype
    length: jax.Array  # int32 [b]

    def mean(self) -> jax.Array:
        """The mean of the tokens, float32 [b, d]."""
        weights = (jnp.arange(self.tokens.shape[1]) < self.length[:, None]).astype(jnp.float32)
        total = jnp.einsum("bsd,bs->bd", self.tokens.astype(jnp.float32), weights)
        return total / jnp.maximum(self.length, 1)[:, None]


@flax.struct.dataclass
class Context:
    """What `velocity` and the critic need to know of an observation."""

    features: Features | None  # for the critics; None if the policy has no features, or the caller asked for none
    memory: Any  # for `velocity` alone: pi0 has a KV cache here, the state-space policy has the state
    # Classifier-free guidance away from another context: v = v_other + guidance (v - v_other).
    other: "Context | None" = None
    guidance: float = flax.struct.field(pytree_node=False, default=1.0)


class FlowPolicy(nnx.Module):
    """Base of all policies. A family implements `encode` and `velocity`."""

    sampling_unroll: int = 1  # denoising steps per iteration of the loop; more pays only if a step is very short

    config: PolicyConfig

    def __init__(self, config: PolicyConfig):
        self.config = config
        self.state_dim = config.state_dim
        self.action_dim = config.action_dim
        self.action_horizon = config.action_horizon
        self.feature_dim = config.feature_dim  # width of the tokens in Context.features; 0: the policy has no features
        self.dtype = config.dtype  # of matrix products
        self.image_keys = config.image_keys  # cameras that the policy reads

    def preprocess(
        self,
        rng: jax.Array | None,
        observation: Observation,
        *,
        train: bool,
        level: AugmentationLevel = "standard",
    ) -> Observation:
        """The observation as `encode` reads it, with images augmented when `train`. States arrive normalised."""
        return preprocess_observation(rng, observation, self.config, train=train, level=level)

    @abc.abstractmethod
    def encode(self, observation: Observation, *, features: bool = True) -> Context:
        """Computes everything that depends on the (preprocessed) observation alone, once."""

    @abc.abstractmethod
    def velocity(self, context: Context, x_t: jax.Array, time: jax.Array) -> jax.Array:
        """Flow at noisy chunks x_t [b, n, T, a] and times [b, n]: [b, n, T, a]."""

    def velocity_fn(self, context: Context) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """`velocity` for a fixed context, for callers that evaluate it many times."""
        return lambda x_t, time: self.velocity(context, x_t, time)

    def guided_velocity_fn(self, context: Context) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """`velocity_fn`, with the guidance of the context if it has one."""
        velocity = self.velocity_fn(context)
        if context.other is None:
            return velocity
        other = self.velocity_fn(context.other)

        def guided(x_t: jax.Array, time: jax.Array) -> jax.Array:
            v_other = other(x_t, time)
            return v_other + context.guidance * (velocity(x_t, time) - v_other)

        return guided

    def flow_matching_loss(self, context: Context, actions: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        """Squared error of the predicted flow, mean over action dims: [b, T].

        actions and noise are [b, T, a], time is [b].
        """
        t = time[:, None, None]
        x_t = t * noise + (1 - t) * actions
        v_t = self.velocity(context, x_t[:, None], time[:, None])[:, 0]
        return jnp.mean(jnp.square(v_t - (noise - actions)), axis=-1)

    def refuse_other_chunks(self, x_t: jax.Array) -> None:
        """Raises an error for chunks that are longer, shorter, wider or narrower than this policy's chunks."""
        if x_t.shape[-2:] != (self.action_horizon, self.action_dim):
            raise ValueError(
                f"action chunks must end in [action_horizon, action_dim] = "
                f"[{self.action_horizon}, {self.action_dim}]; found shape {x_t.shape}"
            )

    @jax.named_scope(DENOISE)
    def denoise(self, context: Context, noise: jax.Array, *, num_steps: int = 10, remat: bool = False) -> jax.Array:
        """Integrates the flow from noise [b, n, T, a] at t = 1 to actions at t = 0 with Euler steps.

        With `remat` a gradient through the steps recomputes each of them instead of storing it.
        """
        dt = jnp.asarray(-1.0 / num_steps, noise.dtype)
        velocity = self.guided_velocity_fn(context)

        def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
            x_t, time = carry
            v_t = velocity(x_t, jnp.broadcast_to(time, x_t.shape[:2]))
            # Time is accumulated like openpi does it: the fastest time features see its last bit.
            return (x_t + dt * v_t.astype(x_t.dtype), time + dt), None

        # The checkpoint needs no barriers, because a scan does not merge its steps.
        step = jax.checkpoint(step, prevent_cse=False) if remat else step
        start = (noise, jnp.ones((), noise.dtype))
        return jax.lax.scan(step, start, length=num_steps, unroll=min(self.sampling_unroll, num_steps))[0][0]

    def sample_with_log_prob(self, context: Context, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunks from noise [b, n, T, a], and their log probabilities [b, n], both with gradient.

        A flow would have to be integrated backwards for this; only families with `has_density` implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot say how probable its chunks are")

    def compute_loss(
        self,
        rng: jax.Array,
        observation: Observation,
        actions: Array,
        *,
        train: bool = False,
        noise: Array | None = None,
        time: Array | None = None,
    ) -> jax.Array:
        """openpi's training loss [b, T]; noise [b, T, a] and time [b] are drawn when not given."""
        preprocess_rng, noise_rng, time_rng = jax.random.split(rng, 3)
        observation = self.preprocess(preprocess_rng, observation, train=train)
        actions = jnp.asarray(actions)
        noise = draw_noise(noise_rng, actions.shape) if noise is None else jnp.asarray(noise)
        time = draw_time(time_rng, actions.shape[0]) if time is None else jnp.asarray(time)
        return self.flow_matching_loss(self.encode(observation, features=False), actions, noise, time)

    def sample_actions(
        self, rng: jax.Array, observation: Observation, *, num_steps: int = 10, noise: Array | None = None
    ) -> jax.Array:
        """One action chunk per observation, [b, T, a]."""
        noise = None if noise is None else noise[:, None]
        return self.sample_candidates(rng, observation, 1, num_steps=num_steps, noise=noise)[:, 0]

    def sample_candidates(
        self,
        rng: jax.Array,
        observation: Observation,
        num_samples: int,
        *,
        num_steps: int = 10,
        noise: Array | None = None,
    ) -> jax.Array:
        """N action chunks per observation against one shared context, [b, n, T, a]."""
        observation = self.preprocess(None, observation, train=False)
        shape = (observation.state.shape[0], num_samples, self.action_horizon, self.action_dim)
        if noise is None:
            noise = draw_noise(rng, shape)
        elif noise.shape != shape:
            raise ValueError(f"noise must be [b, n, horizon, dim] = {shape}, found {noise.shape}")
        return self.denoise(self.encode(observation, features=False), jnp.asarray(noise), num_steps=num_steps)


def draw_noise(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(rng, shape)


def draw_time(rng: jax.Array, batch_size: int) -> jax.Array:
    """Flow times of openpi's training: Beta(1.5, 1), squeezed into [0.001, 1]."""
    return jax.random.beta(rng, 1.5, 1, (batch_size,)) * 0.999 + 0.001
