"""Every random number of an update, drawn before anything else."""

import flax.struct
import jax

from acrlpd.batch import Batch
from acrlpd.models.policy import draw_noise


@flax.struct.dataclass
class Draws:
    """Random numbers for the whole batch, so that splitting the batch into micro-batches changes nothing."""

    flow_noise: jax.Array  # [b, T, a] of the flow-matching losses on logged actions
    flow_time: jax.Array  # [b]
    actor_noise: jax.Array  # [b, T, a] of another flow-matching loss, for an improvement
    actor_time: jax.Array  # [b]
    next_noise: jax.Array  # [b, N, T, a] of candidates at s'
    candidate_noise: jax.Array  # [b, N, T, a] of candidates at s
    dropout_keys: jax.Array  # [b]


def draw(rng: jax.Array, batch: Batch, num_samples: int) -> Draws:
    b, *chunk_shape = batch.actions.shape
    noise_rng, time_rng, next_rng, candidate_rng, dropout_rng = jax.random.split(rng, 5)
    noise = draw_noise(noise_rng, (b, 2, *chunk_shape))
    # openpi's Beta(1.5, 1) by its inverse distribution function. `jax.random.beta` is a rejection loop, which takes
    # longer than the whole update of a small policy.
    time = jax.random.uniform(time_rng, (b, 2)) ** (1 / 1.5) * 0.999 + 0.001
    return Draws(
        flow_noise=noise[:, 0],
        flow_time=time[:, 0],
        actor_noise=noise[:, 1],
        actor_time=time[:, 1],
        next_noise=draw_noise(next_rng, (b, num_samples, *chunk_shape)),
        candidate_noise=draw_noise(candidate_rng, (b, num_samples, *chunk_shape)),
        dropout_keys=jax.random.split(dropout_rng, b),
    )
