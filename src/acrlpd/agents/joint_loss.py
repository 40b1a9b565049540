"""One update's losses, with everything they share computed once.

The observation's prefix is encoded once, with gradient, for behaviour cloning and the actor; critics
and the candidates of the advantage baseline get the same context without gradient. `awr` and cloning
are two weightings of the same flow-matching losses. The next observation's prefix is encoded once,
without gradient and before anything is differentiated, for all N candidates of the target.

The named scopes say what an operation is for; a profile adds up time by the innermost one.
"""

import dataclasses
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.best_of_n import sample_candidates, take_candidate
from acrlpd.agents.critic_networks import CriticNetworks
from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.loss_functions import (
    Algorithm,
    Normalizers,
    SampleWeights,
    bc_weights,
    log_awr_weight,
    neutral_weights,
    normalizers,
    td_loss,
    td_target,
)
from acrlpd.agents.temperature import TemperatureModule, estimate_entropy
from acrlpd.batch import Batch
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy, draw_noise

_Module = TypeVar("_Module", bound=nnx.Module)

Terms = frozenset[str]
POLICY_TERMS: Terms = frozenset({"actor", "bc"})
CRITIC_TERMS: Terms = frozenset({"critic", "alpha"})
ALL_TERMS: Terms = POLICY_TERMS | CRITIC_TERMS
NO_TERMS: Terms = frozenset()


@dataclasses.dataclass(frozen=True)
class Networks:
    """The networks of one update, with the parameters it is taken at."""

    policy: FlowPolicy
    critics: CriticNetworks
    temperature: TemperatureModule

    def without_gradient(self) -> "Networks":
        """The same networks, sampling and judging without learning from it."""
        return Networks(
            policy=_stop_gradient(self.policy),
            critics=jax.lax.stop_gradient(self.critics),
            temperature=_stop_gradient(self.temperature),
        )

    def encode(self, observation: Observation) -> Context:
        """The policy's context, with features only where the critics want them."""
        return self.policy.encode(observation, features=self.critics.uses_features)


def _stop_gradient(module: _Module) -> _Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.lax.stop_gradient(state))


@flax.struct.dataclass
class Draws:
    """Every random number of an update, drawn for the whole batch so that micro-batches change nothing."""

    flow_noise: jax.Array  # [b, T, a] of the flow-matching losses
    flow_time: jax.Array  # [b]
    actor_noise: jax.Array  # [b, T, a] of the flow-matching loss of `best_of_n`
    actor_time: jax.Array  # [b]
    next_noise: jax.Array  # [b, N, T, a] candidates at the next observation
    candidate_noise: jax.Array  # [b, N, T, a] candidates at the observation
    dropout_keys: jax.Array  # [b]


@flax.struct.dataclass
class Targets:
    """What the next observation contributes, [b] each; no gradient ever reaches it."""

    value: jax.Array  # y of the TD loss
    entropy: jax.Array  # of the candidates
    best_q: jax.Array  # of the candidates, under the online critics
    mean_q: jax.Array
    std_q: jax.Array
    diversity: jax.Array  # spread of the candidates: root mean variance over action dims and steps


@flax.struct.dataclass
class Record:
    """Per-sample results from which losses and metrics are reported; [b, ...] each."""

    q: jax.Array | None  # [b, E] at the logged chunk; None where the critic did not learn
    td_loss: jax.Array | None
    bc_loss: jax.Array  # numerators of the normalised sums
    actor_loss: jax.Array
    weights: SampleWeights
    targets: Targets | None


def draw(rng: jax.Array, batch: Batch, num_samples: int) -> Draws:
    b, *chunk_shape = batch.actions.shape
    flow_rng, time_rng, next_rng, candidate_rng, dropout_rng = jax.random.split(rng, 5)
    noise = draw_noise(flow_rng, (b, 2, *chunk_shape))
    # openpi's flow times, Beta(1.5, 1) squeezed into [0.001, 1], by the inverse of its distribution: the
    # general Beta sampler is a rejection loop, which takes longer than a small policy's whole update.
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


@jax.named_scope("sampling")
def compute_targets(
    algorithm: Algorithm, networks: Networks, batch: Batch, draws: Draws, subset_rng: jax.Array
) -> Targets:
    """TD targets: the online critics choose among N candidates, the target critics judge the choice.

    Candidates come from the online policy, not from its moving average: critics are trained on the
    online policy's features, and an update that reads one set of weights gathers one set of weights.
    """
    networks = networks.without_gradient()
    observation = batch.next_observations
    context = networks.encode(observation)
    candidates = _candidates(algorithm, networks.policy, context, draws.next_noise)
    chunks = algorithm.critic_chunks(candidates)
    online, target = networks.critics.online_ensemble, networks.critics.target_ensemble
    q = online.rank(context.features, observation.state, chunks, networks.policy.dtype)  # [b, N]
    best = take_candidate(chunks, jnp.argmax(q, axis=1))
    next_q = target(context.features, observation.state, best[:, None])[:, 0]  # [b, E]
    seen = candidates[..., : algorithm.critic_action_horizon, : algorithm.qchunking.action_dim]
    return Targets(
        value=td_target(batch, target.aggregate_target(next_q, subset_rng), algorithm.acrlpd.discount),
        entropy=estimate_entropy(seen),
        best_q=jnp.max(q, axis=1),
        mean_q=jnp.mean(q, axis=1),
        std_q=jnp.std(q, axis=1),
        diversity=jnp.sqrt(jnp.mean(jnp.var(chunks, axis=1), axis=-1)),
    )


def flow_losses(policy: FlowPolicy, context: Context, batch: Batch, draws: Draws) -> jax.Array:
    """The flow-matching losses [b, T] that cloning and `awr` both weigh."""
    return policy.flow_matching_loss(context, jnp.asarray(batch.actions), draws.flow_noise, draws.flow_time)


def compute_sample_weights(
    algorithm: Algorithm,
    networks: Networks,
    batch: Batch,
    draws: Draws,
    context: Context,
    flow_loss: jax.Array,
) -> SampleWeights:
    """Advantages, AWR weights and difficulties from the observation's context; carries no gradient."""
    networks = networks.without_gradient()
    context, flow_loss = jax.lax.stop_gradient((context, flow_loss))
    advantage = jnp.zeros(flow_loss.shape[0], jnp.float32)
    if algorithm.needs_advantage:
        candidates = _candidates(algorithm, networks.policy, context, draws.candidate_noise)
        actions = jnp.concatenate([batch.actions[:, None], candidates], axis=1)
        q = _aggregated_q(algorithm, networks.critics, context, batch.observations, actions)  # [b, 1 + N]
        # Where the critic may not judge the logged chunk, the sample is neither favoured nor held back.
        advantage = (q[:, 0] - jnp.mean(q[:, 1:], axis=1)) * batch.sequence_mask
    difficulty = jnp.ones_like(advantage)
    if algorithm.acrlpd.bc_difficulty_weighting:
        difficulty = jnp.sum(flow_loss * batch.valid, axis=1) / jnp.maximum(jnp.sum(batch.valid, axis=1), 1.0)
    log_importance = log_awr_weight(advantage, networks.temperature(), algorithm.acrlpd.awr_weight_clip)
    return SampleWeights(advantage=advantage, log_importance=log_importance, difficulty=difficulty)


@jax.named_scope("policy")
def joint_loss(
    algorithm: Algorithm,
    networks: Networks,
    loss_weights: LossWeights,
    batch: Batch,
    draws: Draws,
    targets: Targets | None,
    terms: Terms = ALL_TERMS,
    given: tuple[SampleWeights, Normalizers] | None = None,
) -> tuple[jax.Array, tuple[Record, Normalizers]]:
    """The weighted sum of the losses named in `terms`; what the others would need is not computed.

    `targets` may be missing where neither critics nor temperature learn. `given` holds weights and
    normalizers that were computed for a larger batch of which this is one micro-batch; without it both
    are computed here, from the same context.
    """
    weights, norm = given or (None, None)
    bc = actor = jnp.zeros(batch.actions.shape[0], jnp.float32)
    if terms & POLICY_TERMS:
        context = networks.encode(batch.observations)
        features, flow_loss = context.features, flow_losses(networks.policy, context, batch, draws)
        if weights is None:
            weights = compute_sample_weights(algorithm, networks, batch, draws, context, flow_loss)
    elif networks.critics.uses_features:
        features = networks.encode(batch.observations).features
    else:
        features = None
    weights = neutral_weights(batch) if weights is None else weights
    norm = normalizers(algorithm, batch, weights) if norm is None else norm
    loss = jnp.zeros((), jnp.float32)
    if "bc" in terms:
        bc = bc_weights(algorithm, weights, norm) * jnp.sum(flow_loss * batch.valid, axis=1)
        loss += loss_weights.bc_weight * jnp.sum(bc) / norm.bc
    if "actor" in terms and algorithm.has_actor_loss:
        if algorithm.acrlpd.actor_loss == "awr":
            importance = jnp.exp(weights.log_importance - norm.log_shift)
            actor, actor_norm = importance * jnp.sum(flow_loss * batch.valid, axis=1), norm.awr
        else:
            actor, actor_norm = actor_loss(algorithm, networks, batch, draws, context), norm.samples
        loss += loss_weights.actor_weight * jnp.sum(actor) / actor_norm
    q = td = None
    if targets is not None and "critic" in terms:
        q, td = critic_loss(algorithm, networks.critics, batch, draws, targets, features)
        loss += loss_weights.critic_weight * jnp.sum(td * batch.sequence_mask) / norm.critic
    if targets is not None and "alpha" in terms and algorithm.acrlpd.learnable_temperature:
        alpha_loss = networks.temperature.alpha_loss(targets.entropy, algorithm.target_entropy)
        loss += loss_weights.alpha_weight * jnp.sum(alpha_loss) / norm.samples
    record = Record(q=q, td_loss=td, bc_loss=bc, actor_loss=actor, weights=weights, targets=targets)
    return loss, jax.lax.stop_gradient((record, norm))


@jax.named_scope("critic")
def critic_loss(
    algorithm: Algorithm,
    critics: CriticNetworks,
    batch: Batch,
    draws: Draws,
    targets: Targets,
    features: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Q at the logged chunk [b, E] and its TD loss [b]."""
    if not algorithm.acrlpd.critic_gradient_to_policy:
        features = jax.lax.stop_gradient(features)
    online = critics.online_ensemble
    chunk = algorithm.critic_chunks(batch.actions)
    q = online(features, batch.observations.state, chunk[:, None], draws.dropout_keys)[:, 0]
    td = td_loss(q, targets.value, algorithm.acrlpd)
    if online.config.q_aggregation == "weighted":
        # The weights learn to make the aggregate right; the members do not feel it.
        aggregate = online.aggregate(jax.lax.stop_gradient(q))
        td += td_loss(aggregate[:, None], targets.value, algorithm.acrlpd)
    return q, td


def actor_loss(algorithm: Algorithm, networks: Networks, batch: Batch, draws: Draws, context: Context) -> jax.Array:
    """`best_of_n` or `policy_gradient`, [b]: losses that clone no logged action."""
    fixed = networks.without_gradient()
    fixed_context = jax.lax.stop_gradient(context)
    if algorithm.acrlpd.actor_loss == "best_of_n":
        candidates = _candidates(algorithm, fixed.policy, fixed_context, draws.candidate_noise)
        q = _aggregated_q(algorithm, fixed.critics, fixed_context, batch.observations, candidates)
        best = take_candidate(candidates, jnp.argmax(q, axis=1))
        loss = networks.policy.flow_matching_loss(context, best, draws.actor_noise, draws.actor_time)
        return jnp.mean(loss, axis=1)
    actions = networks.policy.denoise(
        context, draws.candidate_noise[:, :1], num_steps=algorithm.acrlpd.sampling_steps, remat=True
    )
    return -_aggregated_q(algorithm, fixed.critics, fixed_context, batch.observations, actions)[:, 0]


def _aggregated_q(
    algorithm: Algorithm,
    critics: CriticNetworks,
    context: Context,
    observation: Observation,
    actions: jax.Array,
) -> jax.Array:
    """Values of actions [b, n, T, a] under the online critics, [b, n]."""
    online = critics.online_ensemble
    return online.aggregate(online(context.features, observation.state, algorithm.critic_chunks(actions)))


@jax.named_scope("sampling")
def _candidates(algorithm: Algorithm, policy: FlowPolicy, context: Context, noise: jax.Array) -> jax.Array:
    return sample_candidates(
        policy,
        context,
        noise,
        num_steps=algorithm.acrlpd.sampling_steps,
        config=algorithm.acrlpd.best_of_n,
        data_shards=algorithm.data_shards,
    )
