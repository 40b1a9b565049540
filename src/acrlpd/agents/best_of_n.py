"""N candidates per observation, and the choice of one of them.

The noise of all candidates is drawn before, and scores are compared only once all are there: how many
candidates are denoised at a time changes the memory that is needed, never the result.
"""

from collections.abc import Callable, Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from acrlpd.agents.hyperparams import BestOfNConfig
from acrlpd.models.policy import Context, FlowPolicy

_MIB = 2**20


@flax.struct.dataclass
class BestOfN:
    """What was chosen, and among what."""

    actions: jax.Array  # [b, T, a] the chosen chunk
    index: jax.Array  # int32 [b] which candidate it is
    q_values: jax.Array  # [b, N] aggregated values of all candidates
    candidates: jax.Array  # [b, N, T, a]


def sample_candidates(
    policy: FlowPolicy,
    context: Context,
    noise: jax.Array,
    *,
    num_steps: int,
    config: BestOfNConfig,
    data_shards: int = 1,
) -> jax.Array:
    """Denoises noise [b, N, T, a] against one shared context, as many candidates at a time as fit."""
    b, n, *chunk_shape = noise.shape
    size = candidates_at_once(policy, context, noise, config, data_shards)
    if size == n:
        return policy.denoise(context, noise, num_steps=num_steps)
    groups = jnp.moveaxis(noise.reshape(b, n // size, size, *chunk_shape), 1, 0)
    candidates = jax.lax.map(lambda group: policy.denoise(context, group, num_steps=num_steps), groups)
    return jnp.moveaxis(candidates, 0, 1).reshape(noise.shape)


def candidates_at_once(
    policy: FlowPolicy, context: Context, noise: jax.Array, config: BestOfNConfig, data_shards: int
) -> int:
    """How many of the N candidates to denoise together: a divisor of N.

    "auto" estimates what one more candidate costs from the traced velocity network itself, so the
    estimate holds for every policy and needs no device. `data_shards` is the number of devices that
    share the batch, since the limit is per device.
    """
    per_candidate = candidate_bytes(policy, context, noise) / data_shards if config.strategy == "auto" else 0.0
    return group_size(config, noise.shape[1], per_candidate)


def group_size(config: BestOfNConfig, num_candidates: int, bytes_per_candidate: float) -> int:
    """How many of N candidates are denoised together: a divisor of N.

    `bytes_per_candidate` counts for "auto" alone: what one more candidate of every observation needs on a device.
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

    The largest operation (its inputs and outputs together) when two candidates are denoised, less the
    same for one: weights and the shared context cancel out.
    """

    def widest(n: int) -> int:
        x_t = jax.ShapeDtypeStruct((noise.shape[0], n, *noise.shape[2:]), noise.dtype)
        time = jax.ShapeDtypeStruct(x_t.shape[:2], noise.dtype)
        return _widest_operation(policy.velocity, context, x_t, time)

    return widest(2) - widest(1)


def _widest_operation(function: Callable[..., Any], *args: Any) -> int:
    closed = jax.make_jaxpr(function)(*args)

    def size(variable: Any) -> int:
        aval = variable.aval
        return aval.size * aval.dtype.itemsize if hasattr(aval, "size") else 0

    return max(
        sum(map(size, equation.invars)) + sum(map(size, equation.outvars)) for equation in _leaf_equations(closed.jaxpr)
    )


def _leaf_equations(jaxpr: Any) -> Iterator[Any]:
    """Equations that compute something themselves, inside loops and calls too."""
    for equation in jaxpr.eqns:
        inner = [
            sub.jaxpr if hasattr(sub, "jaxpr") else sub
            for value in equation.params.values()
            for sub in (value if isinstance(value, (tuple, list)) else [value])
            if hasattr(sub, "eqns") or hasattr(getattr(sub, "jaxpr", None), "eqns")
        ]
        if inner:
            for sub in inner:
                yield from _leaf_equations(sub)
        else:
            yield equation


def select(
    candidates: jax.Array,
    q_values: jax.Array,
    *,
    rng: jax.Array,
    config: BestOfNConfig,
    temperature: jax.Array,
    critic_chunks: jax.Array,
) -> BestOfN:
    """Chooses one of N candidates [b, N, T, a] by value [b, N].

    With top_k 1 it is the best. Otherwise one of the k best is drawn, with probabilities
    softmax(value / temperature). `critic_chunks` [b, N, c] is what the critics saw: the part in which
    candidates must differ to earn the diversity bonus.
    """
    scores = q_values
    if config.diversity_weight:
        scores = scores + config.diversity_weight * mean_distance(critic_chunks)
    k = min(config.top_k, q_values.shape[1])
    if k == 1:
        index = jnp.argmax(scores, axis=1)
    else:
        if config.selection_temperature is not None:
            temperature = jnp.asarray(config.selection_temperature, jnp.float32)
        best, order = jax.lax.top_k(scores, k)
        drawn = jax.random.categorical(rng, best / temperature, axis=1)
        index = jnp.take_along_axis(order, drawn[:, None], axis=1)[:, 0]
    return BestOfN(
        actions=take_candidate(candidates, index),
        index=index.astype(jnp.int32),
        q_values=q_values,
        candidates=candidates,
    )


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
