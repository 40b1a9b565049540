"""The loss that fits an ensemble of critics to targets."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from acrlpd.agents.critics.base import CriticEnsemble
from acrlpd.agents.hyperparams import ACRLPDHyperparams

# Errors y - Q [b, E] to how much each of them counts [b, E].
ErrorWeights = Callable[[jax.Array], jax.Array]


def td_loss(
    q: jax.Array, target: jax.Array, hyperparams: ACRLPDHyperparams, weigh: ErrorWeights = jnp.ones_like
) -> jax.Array:
    """l(Q_e - y) of every member [b, E] against the one target [b], mean over members: [b]."""
    error = target[:, None] - q
    if hyperparams.critic_loss == "huber":
        loss = optax.losses.huber_loss(error, delta=hyperparams.huber_delta)
    else:
        loss = jnp.square(error)
    return jnp.mean(weigh(error) * loss, axis=-1)


def ensemble_td_loss(
    ensemble: CriticEnsemble,
    q: jax.Array,
    target: jax.Array,
    hyperparams: ACRLPDHyperparams,
    weigh: ErrorWeights = jnp.ones_like,
) -> jax.Array:
    """`td_loss` of the values q [b, E] of an ensemble, and of their mixture where the mixture is learned: [b]."""
    loss = td_loss(q, target, hyperparams, weigh)
    if ensemble.config.q_aggregation == "weighted":
        # The mixing weights learn to make the aggregate right; the members do not feel this loss.
        aggregate = ensemble.aggregate(jax.lax.stop_gradient(q))
        loss += td_loss(aggregate[:, None], target, hyperparams, weigh)
    return loss
