"""A policy and the critics that choose among its candidates: what is left of an agent when it only acts."""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents import Algorithm, CriticEnsemble
from acrlpd.agents.best_of_n import sample_candidates, take_candidate
from acrlpd.models.observation import Observation
from acrlpd.models.policy import FlowPolicy


class ServedModel(flax.struct.PyTreeNode):
    """Arrays of one checkpoint; models of the same config are the same to a compiled function."""

    params: nnx.State
    critic_params: nnx.State | None  # None: no critics, so nothing to choose by
    policy_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    critic_def: nnx.GraphDef | None = flax.struct.field(pytree_node=False)
    algorithm: Algorithm = flax.struct.field(pytree_node=False)

    @property
    def policy(self) -> FlowPolicy:
        return nnx.merge(self.policy_def, self.params)

    @property
    def critics(self) -> CriticEnsemble | None:
        if self.critic_def is None:
            return None
        return nnx.merge(self.critic_def, self.critic_params)

    @property
    def num_critics(self) -> int:
        critics = self.critics
        return 0 if critics is None else critics.config.num_critics


@flax.struct.dataclass
class Choice:
    """What was chosen, and among what."""

    actions: jax.Array  # [b, T, a]
    index: jax.Array  # int32 [b]
    q_values: jax.Array | None  # [b, N]; None without critics
    candidates: jax.Array  # [b, N, T, a]


def candidates_and_values(
    model: ServedModel, observation: Observation, noise: jax.Array, *, num_steps: int
) -> tuple[jax.Array, jax.Array | None]:
    """Denoised candidates for noise [b, N, T, a], and what every critic thinks of them [b, N, E]."""
    policy, critics = model.policy, model.critics
    observation = policy.preprocess(None, observation, train=False)
    context = policy.encode(observation, features=critics is not None and critics.feature_dim > 0)
    candidates = sample_candidates(policy, context, noise, num_steps=num_steps, config=model.algorithm.acrlpd.best_of_n)
    if critics is None:
        return candidates, None
    chunks = model.algorithm.critic_chunks(candidates)
    return candidates, critics(context.features, jnp.asarray(observation.state), chunks)


@partial(jax.jit, static_argnames="num_steps")
def choose_actions(
    model: ServedModel, observation: Observation, noise: Any, num_candidates: Any, *, num_steps: int
) -> Choice:
    """The candidate of the highest value, of the first `num_candidates` [b] of each row.

    Exploration (`top_k`, `diversity_weight`) belongs to training: what is served is the best.
    """
    candidates, member_values = candidates_and_values(model, observation, jnp.asarray(noise), num_steps=num_steps)
    if member_values is None:
        index = jnp.zeros(candidates.shape[0], jnp.int32)
        return Choice(take_candidate(candidates, index), index, None, candidates)
    critics = model.critics
    assert critics is not None
    q_values = critics.aggregate(member_values)
    allowed = jnp.arange(q_values.shape[1]) < jnp.asarray(num_candidates)[:, None]
    index = jnp.argmax(jnp.where(allowed, q_values, -jnp.inf), axis=1).astype(jnp.int32)
    return Choice(take_candidate(candidates, index), index, q_values, candidates)
