"""DQC, decoupled Q-chunking: long chunks make the targets, and critics of their first actions choose candidates."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax import nnx

from acrlpd.agents.backups.base import Targets
from acrlpd.agents.backups.implicit_value import ImplicitValue, optimistic_weights
from acrlpd.agents.critics.base import CriticConfig, CriticEnsemble, ObservationReader
from acrlpd.agents.hyperparams import ACRLPDHyperparams, QChunkingConfig
from acrlpd.agents.networks import Networks
from acrlpd.agents.td_loss import ensemble_td_loss
from acrlpd.agents.value_network import ValueNetwork
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig

if TYPE_CHECKING:
    from acrlpd.agents.improvements.base import View


@dataclasses.dataclass(frozen=True)
class Decoupled(ImplicitValue):
    """Chunk critics Q_H(s, a_0 .. a_{H-1}) learn from the reward; the critics Q(s, a_0 .. a_{C-1}) learn from Q_H.

    The critics are the paper's partial critics, and C is `qchunking.critic_action_horizon`. The target of the critics
    is the value of the whole logged chunk. An expectile above 0.5 makes the critics optimistic about the H - C actions
    that they do not see. So a robot may look again after C steps although a target reaches over H steps. V(s) is that
    of `implicit_value`, and ends the target of the chunk critics.

    What differs from the paper: values are regressed, because rewards need not lie between 0 and 1, where the paper has
    sigmoids and cross entropy. There are no goals. The policy clones at least H actions, of which the first C are used,
    because a batch has as many actions as the policy predicts; the paper's policy predicts C actions.
    """

    # Which expectile of the chunk critics' values the critics learn: kappa_d in the paper, whose kappa_b is `kappa`.
    # 0.5: the mean over what followed the first C actions in the data; close to 1: the best of what followed.
    distillation_kappa: Annotated[float, Interval(gt=0, lt=1)] = 0.8

    def create_networks(
        self,
        *,
        critic: CriticConfig,
        qchunking: QChunkingConfig,
        reader: ObservationReader,
        state_dim: int,
        rngs: nnx.Rngs,
    ) -> nnx.Module:
        chunk_dim = qchunking.horizon_length * qchunking.action_dim
        return DecoupledNetworks(
            value=ValueNetwork(self.hidden_dims, reader, state_dim, 1, rngs),
            chunk_critics=critic.create(reader=reader, state_dim=state_dim, chunk_dim=chunk_dim, rngs=rngs),
        )

    def value(self, networks: Networks) -> ValueNetwork:
        return _own(networks).value

    def critic_targets(self, view: "View", targets: Targets) -> jax.Array:
        critics = _own(view.fixed).chunk_critics
        return critics.aggregate(_judge(critics, view, dropout_keys=None))

    def losses(self, view: "View", targets: Targets, subset_rng: jax.Array) -> jax.Array:
        critics = _own(view.networks).chunk_critics
        q = _judge(critics, view, view.draws.dropout_keys)
        td = ensemble_td_loss(critics, q, targets.value, view.algorithm.acrlpd)
        return td + super().losses(view, targets, subset_rng)

    def error_weights(self, error: jax.Array) -> jax.Array:
        return optimistic_weights(error, self.distillation_kappa)

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, qchunking: QChunkingConfig
    ) -> Iterator[Finding]:
        yield from super().check(hyperparams, model=model, qchunking=qchunking)
        horizon, seen = qchunking.horizon_length, qchunking.chunk_length
        if seen == horizon:
            yield error(
                f"backup decoupled needs critics that see fewer actions than a target has steps: set "
                f"qchunking.critic_action_horizon below qchunking.horizon_length {horizon}, or choose backup "
                "implicit_value"
            )
        if horizon > model.action_horizon:
            yield error(
                f"backup decoupled judges chunks of qchunking.horizon_length {horizon} actions, and a batch has "
                f"model.action_horizon {model.action_horizon}: lower the first or raise the second"
            )


class DecoupledNetworks(nnx.Module):
    """V and the chunk critics, which share what they read of an observation."""

    def __init__(self, value: ValueNetwork, chunk_critics: CriticEnsemble):
        self.value = value
        self.chunk_critics = chunk_critics


def _judge(critics: CriticEnsemble, view: "View", dropout_keys: jax.Array | None) -> jax.Array:
    """Values [b, E] of the logged chunks: of their first H steps and the real dims."""
    batch, qchunking = view.batch, view.algorithm.qchunking
    seen = jnp.asarray(batch.actions)[:, : qchunking.horizon_length, : qchunking.action_dim]
    chunks = seen.reshape(len(seen), 1, -1)
    return critics(view.fixed_context.features, batch.observations, chunks, dropout_keys)[:, 0]


def _own(networks: Networks) -> DecoupledNetworks:
    assert isinstance(networks.backup, DecoupledNetworks)
    return networks.backup
