"""A policy and the critics that choose among its candidates: the part of an agent that acts."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.agents import Agent, Algorithm
from acrlpd.agents.best_of_n import select, take_candidate
from acrlpd.agents.hyperparams import BestOfNConfig
from acrlpd.agents.networks import CriticNetworks, Networks
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.models.observation import Observation
from acrlpd.models.policy import FlowPolicy


class ActingCritics(flax.struct.PyTreeNode):
    """The critics, and what is learned with them. Without critics the policy alone acts, with one candidate."""

    online: nnx.State  # of a config with `critic_ema_decay`, the moving average of the online critics
    temperature: nnx.State
    improvement: nnx.State  # the improvement's own networks; empty for most improvements
    critic_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    temperature_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    improvement_def: nnx.GraphDef | None = flax.struct.field(pytree_node=False)


class ActingModel(flax.struct.PyTreeNode):
    """The arrays that act. Models of the same config are the same to a compiled function."""

    params: nnx.State
    critics: ActingCritics | None
    policy_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    algorithm: Algorithm = flax.struct.field(pytree_node=False)

    def policy(self) -> FlowPolicy:
        return nnx.merge(self.policy_def, self.params)

    def networks(self) -> Networks:
        """The networks of a model with critics, as modules."""
        critics = self.critics
        assert critics is not None
        own = None if critics.improvement_def is None else nnx.merge(critics.improvement_def, critics.improvement)
        return Networks(
            policy=self.policy(),
            critics=CriticNetworks(critics.online, critics.online, critics.critic_def),  # acting asks no target critics
            temperature=nnx.merge(critics.temperature_def, critics.temperature),
            improvement=own,
            backup=None,  # acting computes no targets
        )


def acting_model(agent: Agent, *, average: bool) -> ActingModel:
    """The part of an agent that acts: the policy, or its moving average if there is an average, and the critics.

    Critics that keep a moving average choose with the average. An agent that only clones has critics that were never
    trained, so they are left out.
    """
    critics = ActingCritics(
        online=agent.critics.acting,
        temperature=agent.temperature_params,
        improvement=agent.improvement.params,
        critic_def=agent.critics.network,
        temperature_def=agent.temperature_def,
        improvement_def=agent.improvement.network,
    )
    return ActingModel(
        params=agent.served_params(average=average),
        critics=critics if agent.algorithm.has_critic else None,
        policy_def=agent.policy_def,
        algorithm=agent.algorithm,
    )


def abstract_model(rl_config: RLTrainConfig) -> ActingModel:
    """The part of a config's agent that acts, as shapes and dtypes."""
    agent = jax.eval_shape(partial(create_agent, rl_config), jax.random.key(0))
    return acting_model(agent, average=rl_config.acts_with_average)


@jax.jit
def stack_models(models: Sequence[ActingModel]) -> ActingModel:
    """Models of the same config as one model, whose arrays have the axis of the models first."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)


class ChosenActions(flax.struct.PyTreeNode):
    """The chosen chunks, and the candidates that they were chosen from."""

    actions: jax.Array  # [b, T, a]
    index: jax.Array  # int32 [b]
    q_values: jax.Array | None  # [b, N]; None without critics
    candidates: jax.Array  # [b, N, T, a]
    noise: jax.Array | None = None  # [b, n] of the chosen chunks, where critics judge noise; None elsewhere


def candidate_noise(seed: int, num_candidates: int, action_horizon: int, action_dim: int) -> np.ndarray:
    """The noise [N, T, a] of all candidates of one observation.

    It follows from the seed alone, and candidate i gets the same noise whatever N is.
    """
    return np.random.default_rng(seed).standard_normal((num_candidates, action_horizon, action_dim), np.float32)


class JudgedCandidates(NamedTuple):
    """The candidates of a model with critics."""

    actions: jax.Array  # [b, N, T, a]
    judged: jax.Array  # [b, N, c] what the critics saw of them
    member_values: jax.Array  # [b, N, E]


def judge_candidates(
    model: ActingModel, observation: Observation, noise: jax.Array, *, num_steps: int
) -> JudgedCandidates:
    """The candidates of a model with critics for noise [b, N, T, a], and their values by every critic."""
    networks, algorithm = model.networks(), model.algorithm
    observation = networks.policy.preprocess(None, observation, train=False)
    context = networks.encode(observation)
    candidates = algorithm.candidates(networks, context, observation, noise, num_steps=num_steps)
    judged = algorithm.judged(networks, context, observation, noise, candidates)
    values = networks.critics.online_ensemble(context.features, observation, judged)
    return JudgedCandidates(candidates, judged, values)


@partial(jax.jit, static_argnames=("num_steps", "exploration"))
def choose_actions(
    model: ActingModel,
    observation: Observation,
    noise: Any,
    num_candidates: Any,
    seeds: Any = None,
    *,
    num_steps: int,
    exploration: BestOfNConfig | None = None,
) -> ChosenActions:
    """One of the first `num_candidates` [b] candidates of each observation, for noise [b, N, T, a].

    Without `exploration` it is the candidate of the highest value. With `exploration` the choice is drawn as that
    config says, for each observation from its own seed in `seeds`, uint32 [b].
    """
    noise = jnp.asarray(noise)
    if model.critics is None:
        policy = model.policy()
        observation = policy.preprocess(None, observation, train=False)
        context = policy.encode(observation, features=False)
        context = model.algorithm.acting_context(policy, context, observation)
        candidates = model.algorithm.clip(policy.denoise(context, noise, num_steps=num_steps))
        return ChosenActions(candidates[:, 0], jnp.zeros(noise.shape[0], jnp.int32), None, candidates)
    candidates, judged, member_values = judge_candidates(model, observation, noise, num_steps=num_steps)
    q_values = model.networks().critics.online_ensemble.aggregate(member_values)
    allowed = jnp.arange(q_values.shape[1]) < jnp.asarray(num_candidates)[:, None]
    scores = jnp.where(allowed, q_values, -jnp.inf)
    if exploration is None:
        index = jnp.argmax(scores, axis=1).astype(jnp.int32)
    else:
        temperature = model.networks().temperature()

        def draw(judged: jax.Array, scores: jax.Array, seed: jax.Array) -> jax.Array:
            index = select(
                scores[None],
                rng=jax.random.key(seed),
                config=exploration,
                temperature=temperature,
                critic_chunks=judged[None],
            )
            return index[0].astype(jnp.int32)

        index = jax.vmap(draw)(judged, scores, jnp.asarray(seeds))
    chosen_noise = take_candidate(judged, index) if model.algorithm.judges_noise else None
    return ChosenActions(take_candidate(candidates, index), index, q_values, candidates, chosen_noise)


@partial(jax.jit, static_argnames=("num_steps", "exploration"))
def choose_actions_of_models(
    models: ActingModel,
    observation: Observation,
    noise: Any,
    num_candidates: Any,
    seeds: Any,
    *,
    num_steps: int,
    exploration: BestOfNConfig | None,
) -> ChosenActions:
    """`choose_actions` of S stacked models in one program, for S * b observations: the b of the first model first."""
    [num_models] = {leaf.shape[0] for leaf in jax.tree.leaves(models)}
    rows = jax.tree.map(
        lambda x: jnp.reshape(x, (num_models, -1, *jnp.shape(x)[1:])), (observation, noise, num_candidates, seeds)
    )
    choose = partial(choose_actions, num_steps=num_steps, exploration=exploration)
    chosen = jax.vmap(choose)(models, *rows)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chosen)
