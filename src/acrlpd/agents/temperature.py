"""Temperatures that follow from what they should bring about: how many samples count, how even a choice is.

Both measures rise with alpha, so bisection finds the alpha of a wanted value. A temperature that is found in this way
does not depend on how long a run has lasted.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Bounds of alpha in units of the spread of what alpha divides. At the lower bound the best takes all of the weight, at
# the upper bound all weights are equal.
_MAX_LOG_ALPHA = math.log(1e3)
_HALVINGS = 20  # leave an error of 1e-5 in log alpha
_TINY = 1e-30  # values whose spread is below this count as equal


def largest_log_weight(log_weight: jax.Array) -> jax.Array:
    """The largest log weight, which is subtracted to keep exp() in range; 0 if no sample counts."""
    largest = jnp.max(log_weight)
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def effective_share(log_weight: jax.Array) -> jax.Array:
    """(sum W)^2 / (B sum W^2) of the B weights W = exp(log_weight) that are not 0; 0 if all weights are 0.

    The share is 1 where all weights are equal, and 1 / B where one has everything. For W = exp(A / alpha) it rises with
    alpha. With beta = 1 / alpha, the derivative of its logarithm by beta is 2 (E_beta[A] - E_2beta[A]), where E_beta is
    the mean under weights exp(beta A). That mean rises with beta (its derivative is a variance), so the difference is
    never positive.
    """
    weight = jnp.exp(log_weight - largest_log_weight(log_weight))  # a common factor cancels out
    num_counting = jnp.sum(log_weight != -jnp.inf)
    return jnp.square(jnp.sum(weight)) / jnp.maximum(num_counting * jnp.sum(jnp.square(weight)), 1.0)


def choice_entropy(values: jax.Array, alpha: jax.Array) -> jax.Array:
    """The entropy of softmax(values / alpha) over N candidates [b, N], as a share of the largest, log N: [b].

    The share rises with alpha: the derivative of the entropy by alpha is Var[values] / alpha^3.
    """
    log_p = jax.nn.log_softmax(values / alpha[..., None], axis=-1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return entropy / math.log(values.shape[-1])


def solve_alpha(measure: Callable[[jax.Array], jax.Array], target: float, shape: tuple[int, ...]) -> jax.Array:
    """alpha [shape] at which `measure`, which rises with alpha, is `target`; a bound where no alpha reaches `target`.

    Values must have a spread of about 1: alpha is looked for between 1e-3 and 1e3.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        above = measure(jnp.exp(middle)) > target
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    bounds = jnp.full(shape, -_MAX_LOG_ALPHA, jnp.float32), jnp.full(shape, _MAX_LOG_ALPHA, jnp.float32)
    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, bounds)
    return jnp.exp(0.5 * (low + high))


def over_spread(x: jax.Array, counts: jax.Array) -> jax.Array:
    """x in units of the standard deviation of those that count (bool); x itself where these are all equal.

    The deviation is that of the batch, which a run need not remember. With 32 samples and more, weights scatter less
    than with the deviation of all data, because a batch with large values divides by its own large deviation.
    """
    spread = jnp.std(x, where=counts)
    return x / jnp.where(spread > _TINY, spread, 1.0)


def follow_choice(log_alpha: jax.Array, values: jax.Array, entropy: float) -> jax.Array:
    """The loss of a learned alpha for each state [b], from the values of N candidates [b, N].

    Each state has an alpha_b of its own, at which the choice among its candidates has the wanted share of the largest
    entropy. log alpha is regressed to the logarithms of all alpha_b, so it settles at their mean. A state whose
    candidates have equal values says nothing.
    """
    values = jax.lax.stop_gradient(values)
    highest = jnp.max(values, axis=-1)
    spread = highest - jnp.min(values, axis=-1)
    known = spread > _TINY
    spread = jnp.where(known, spread, 1.0)
    scaled = (values - highest[:, None]) / spread[:, None]
    alpha = solve_alpha(lambda alpha: choice_entropy(scaled, alpha), entropy, spread.shape)
    own = jnp.log(alpha) + jnp.log(spread)
    return jnp.where(known, 0.5 * jnp.square(log_alpha - own), 0.0)
