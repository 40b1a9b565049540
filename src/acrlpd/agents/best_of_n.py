"""N candidates per observation, and the choice of one of them.

The noise of all candidates is drawn first, and scores are compared once all candidates are there. How many candidates
are denoised at a time changes the memory that is needed, never the result.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from acrlpd.agents.hyperparams import BestOfNConfig
from acrlpd.models.policy import Context, FlowPolicy

_MIB = 2**20


def sample_candidates(
    policy: FlowPolicy,
    context: Context,
    noise: jax.Array,
    *,
    num_steps: int,
    config: BestOfNConfig,
    data_shards: int = 1,
) -> jax.Array:
    """Denoises noise [b, N, T, a] against one shared context, as many candidates at a time as fit.

    `data_shards` is the number of devices that share the batch, because the memory limit is per device.
    """
    b, n, *chunk_shape = noise.shape
    per_candidate = candidate_bytes(policy, context, noise) / data_shards if config.strategy == "auto" else 0.0
    size = group_size(config, n, per_candidate)
    if size == n:
        return policy.denoise(context, noise, num_steps=num_steps)
    groups = jnp.moveaxis(noise.reshape(b, n // size, size, *chunk_shape), 1, 0)
    candidates = jax.lax.map(lambda group: policy.denoise(context, group, num_steps=num_steps), groups)
    return jnp.moveaxis(candidates, 0, 1).reshape(noise.shape)


def group_size(config: BestOfNConfig, num_candidates: int, bytes_per_candidate: float) -> int:
    """How many of N candidates are denoised together: a divisor of N.

    `bytes_per_candidate` is what one more candidate of every observation needs on a device; only "auto" reads it.
    """
    wanted = {
        "parallel": num_candidates,
        "sequential": 1,
        "chunked": config.chunk_size,
        "auto": int(config.memory_limit_mib * _MIB / max(bytes_per_candidate, 1.0)),
    }[config.strategy]
    divisors = [size for size in range(1, num_candidates + 1) if num_candidates % size == 0]
    return max(size for size in divisors if size <= max(wanted, 1))


def candidate_bytes(policy: FlowPolicy, context: Context, noise: jax.Array) -> int:
    """Working memory of one more candidate per observation during a denoising step, estimated.

    The size of an operation is that of its inputs and outputs. The estimate is the largest operation for two candidates
    minus the largest operation for one candidate: weights and the shared context cancel out. The operations
    are those of the traced velocity network, so the estimate holds for every policy and needs no device.
    """

    def size(variable: Any) -> int:
        aval = variable.aval
        return aval.size * aval.dtype.itemsize if hasattr(aval, "size") else 0

    def widest(n: int) -> int:
        x_t = jax.ShapeDtypeStruct((noise.shape[0], n, *noise.shape[2:]), noise.dtype)
        time = jax.ShapeDtypeStruct(x_t.shape[:2], noise.dtype)
        operations = _leaf_equations(jax.make_jaxpr(policy.velocity)(context, x_t, time).jaxpr)
        return max(sum(map(size, (*operation.invars, *operation.outvars))) for operation in operations)

    return widest(2) - widest(1)


def _leaf_equations(jaxpr: Any) -> Iterator[Any]:
    """Equations that compute something themselves, inside loops and calls too."""
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        for sub in inner:
            yield from _leaf_equations(sub)
        if not inner:
            yield equation


def select(
    q_values: jax.Array, *, rng: jax.Array, config: BestOfNConfig, temperature: jax.Array, critic_chunks: jax.Array
) -> jax.Array:
    """Chooses one of N candidates by their values [b, N]: its index, int32 [b].

    With top_k 1 the best candidate is chosen. Otherwise one of the k best is drawn, with probabilities
    softmax(value / temperature). `critic_chunks` [b, N, c] is the part of the candidates that the critics saw: in this
    part candidates must differ to earn the diversity bonus.
    """
    scores = q_values
    if config.diversity_weight:
        scores = scores + config.diversity_weight * mean_distance(critic_chunks)
    k = min(config.top_k, q_values.shape[1])
    if k == 1:
        return jnp.argmax(scores, axis=1).astype(jnp.int32)
    if config.selection_temperature is not None:
        temperature = jnp.asarray(config.selection_temperature, jnp.float32)
    best, order = jax.lax.top_k(scores, k)
    drawn = jax.random.categorical(rng, best / temperature, axis=1)
    return take_candidate(order, drawn).astype(jnp.int32)


def take_candidate(candidates: jax.Array, index: jax.Array) -> jax.Array:
    """[b, N, ...] and [b] -> [b, ...]."""
    index = index.reshape(-1, *(1,) * (candidates.ndim - 1))
    return jnp.take_along_axis(candidates, index, axis=1)[:, 0]


def mean_distance(chunks: jax.Array) -> jax.Array:
    """Mean distance of each candidate to the others, [b, N, c] -> [b, N]."""
    n = chunks.shape[1]
    difference = chunks[:, :, None] - chunks[:, None]
    squared = jnp.sum(jnp.square(difference), axis=-1)
    return jnp.sum(jnp.sqrt(squared), axis=-1) / max(n - 1, 1)
