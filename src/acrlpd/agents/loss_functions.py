"""The pieces of the losses, as functions of arrays. `joint_loss` puts them together."""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import optax

from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.batch import Batch
from acrlpd.models.observation import Array

# The agent carries the weights as arrays, so that a schedule can move them without a new compile.
jax.tree_util.register_dataclass(
    LossWeights, data_fields=[field.name for field in dataclasses.fields(LossWeights)], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What an update does, apart from networks and arrays: static under jit."""

    acrlpd: ACRLPDHyperparams
    qchunking: QChunkingConfig
    # Whether the current observation's images are augmented.
    augment_images: bool = True
    # Devices that share a batch; only the memory estimate of best-of-N asks.
    data_shards: int = 1

    @property
    def has_critic(self) -> bool:
        """Whether there is anything to learn for the critics; without, training is cloning."""
        return self.acrlpd.loss_weights.critic_weight != 0

    @property
    def has_actor_loss(self) -> bool:
        """False for plain Q-chunking: the policy is cloned, and improved only by choosing among candidates."""
        return self.acrlpd.loss_weights.actor_weight != 0

    @property
    def needs_advantage(self) -> bool:
        return self.acrlpd.bc_importance_weighting or (self.has_actor_loss and self.acrlpd.actor_loss == "awr")

    @property
    def needs_batch_weights(self) -> bool:
        """Whether samples are weighted by numbers that are normalised over the whole batch."""
        return self.needs_advantage or self.acrlpd.bc_difficulty_weighting

    @property
    def critic_action_horizon(self) -> int:
        return self.qchunking.critic_action_horizon or self.qchunking.horizon_length

    @property
    def target_entropy(self) -> float:
        if self.acrlpd.target_entropy is not None:
            return self.acrlpd.target_entropy
        return -self.acrlpd.target_entropy_multiplier * self.qchunking.action_dim

    def critic_chunks(self, actions: Array) -> jax.Array:
        """What critics see of actions [..., T, a]: the first steps and the real dims, flattened."""
        chunk = jnp.asarray(actions)[..., : self.critic_action_horizon, : self.qchunking.action_dim]
        return chunk.reshape(*chunk.shape[:-2], -1)


def chunk_return(rewards: Array, valid: Array, discount: float) -> jax.Array:
    """Discounted rewards inside the chunk, [b, H] -> [b]."""
    powers = discount ** jnp.arange(rewards.shape[1], dtype=jnp.float32)
    return jnp.sum(rewards * valid[:, : rewards.shape[1]] * powers, axis=1)


def td_target(batch: Batch, next_q: jax.Array, discount: float) -> jax.Array:
    """y = sum_i gamma^i r_i + gamma^H * mask * Q(s_{t+H}, a'), [b]; no bootstrap past a true terminal."""
    horizon = batch.rewards.shape[1]
    bootstrap = discount**horizon * batch.masks[:, -1] * next_q
    return chunk_return(batch.rewards, batch.valid, discount) + bootstrap


def td_loss(q: jax.Array, target: jax.Array, hyperparams: ACRLPDHyperparams) -> jax.Array:
    """Error of every member [b, E] against the one target [b], mean over members: [b]."""
    error = q - target[:, None]
    if hyperparams.critic_loss == "huber":
        return jnp.mean(optax.losses.huber_loss(error, delta=hyperparams.huber_delta), axis=-1)
    return jnp.mean(jnp.square(error), axis=-1)


def log_awr_weight(advantage: jax.Array, temperature: jax.Array, clip: float) -> jax.Array:
    """log of exp(advantage / temperature), clipped from above."""
    return jnp.minimum(advantage / temperature, math.log(clip))


@flax.struct.dataclass
class SampleWeights:
    """How much each sample counts, before normalisation over the batch; without gradient."""

    advantage: jax.Array  # [b] Q(s, a) - mean Q of the candidates at s
    log_importance: jax.Array  # [b] log AWR weight
    difficulty: jax.Array  # [b] the sample's own flow-matching loss, or 1


def neutral_weights(batch: Batch) -> SampleWeights:
    """Every sample counts the same."""
    zeros = jnp.zeros(batch.actions.shape[0], jnp.float32)
    return SampleWeights(advantage=zeros, log_importance=zeros, difficulty=zeros + 1.0)


@flax.struct.dataclass
class Normalizers:
    """What sums over samples are divided by: always of the whole batch, never of a micro-batch.

    That makes the gradient of an accumulated update the sum of its micro-batches' gradients, exactly.
    """

    samples: jax.Array  # number of samples
    critic: jax.Array  # samples the critic may learn from
    awr: jax.Array
    bc: jax.Array
    log_shift: jax.Array  # largest log importance; keeps exp() in range and cancels out


def normalizers(algorithm: Algorithm, batch: Batch, weights: SampleWeights) -> Normalizers:
    steps = jnp.sum(batch.valid, axis=1)
    log_shift = jnp.max(weights.log_importance)
    importance = jnp.exp(weights.log_importance - log_shift)
    return Normalizers(
        samples=jnp.asarray(steps.shape[0], jnp.float32),
        critic=jnp.maximum(jnp.sum(batch.sequence_mask), 1.0),
        awr=jnp.maximum(jnp.sum(importance * steps), 1e-8),
        bc=jnp.maximum(jnp.sum(_bc_weights(algorithm, weights, importance) * steps), 1e-8),
        log_shift=log_shift,
    )


def bc_weights(algorithm: Algorithm, weights: SampleWeights, norm: Normalizers) -> jax.Array:
    """Weights of the cloning loss, [b]: all 1 unless the config asks for importance or difficulty."""
    return _bc_weights(algorithm, weights, jnp.exp(weights.log_importance - norm.log_shift))


def _bc_weights(algorithm: Algorithm, weights: SampleWeights, importance: jax.Array) -> jax.Array:
    return weights.difficulty * importance if algorithm.acrlpd.bc_importance_weighting else weights.difficulty
