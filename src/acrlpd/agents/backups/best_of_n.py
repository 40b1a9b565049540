"""The value of the best of N candidates: the target of Q-chunking."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp

from acrlpd.agents.backups.base import Backup, NextCandidates, Targets, td_target
from acrlpd.agents.best_of_n import take_candidate
from acrlpd.agents.networks import Draws, Networks
from acrlpd.batch import Batch

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class BestOfN(Backup):
    """y bootstraps from Qtarget(s', c'): online critics choose c' among N candidates at s', target critics judge c'.

    Candidates come from the online policy instead of its moving average, because the critics are trained on the online
    policy's features. Also, under FSDP an update then gathers one set of weights instead of two.
    """

    has_candidates: ClassVar[bool] = True

    @jax.named_scope("sampling")
    def targets(
        self, algorithm: "Algorithm", networks: Networks, batch: Batch, draws: Draws, subset_rng: jax.Array
    ) -> Targets:
        observation = batch.next_observations
        context = networks.encode(observation)
        candidates = algorithm.candidates(networks, context, observation, draws.next_noise)
        chunks = algorithm.judged(networks, context, observation, draws.next_noise, candidates)
        online, target = networks.critics.online_ensemble, networks.critics.target_ensemble
        q = online.rank(context.features, observation, chunks, networks.policy.dtype)  # [b, N]
        best = take_candidate(chunks, jnp.argmax(q, axis=1))
        next_q = target(context.features, observation, best[:, None])[:, 0]  # [b, E]
        return Targets(
            value=td_target(batch, target.aggregate_target(next_q, subset_rng), algorithm.acrlpd.discount),
            candidates=NextCandidates(q, diversity=jnp.sqrt(jnp.mean(jnp.var(chunks, axis=1), axis=-1))),
        )
