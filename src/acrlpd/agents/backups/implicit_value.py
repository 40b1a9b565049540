"""A value network that learns from the logged chunks alone: the implicit value of IQL and DQC."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval, MinLen
from flax import nnx

from acrlpd.agents.backups.base import Backup, Targets, td_target
from acrlpd.agents.critics.base import CriticConfig, ObservationReader
from acrlpd.agents.hyperparams import QChunkingConfig
from acrlpd.agents.networks import Draws, Networks
from acrlpd.agents.value_network import ValueNetwork
from acrlpd.batch import Batch

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm
    from acrlpd.agents.improvements.base import View


@dataclasses.dataclass(frozen=True)
class ImplicitValue(Backup):
    """y bootstraps from V(s'), and V(s) is a high quantile or expectile of Qtarget(s, c) over the logged chunks c.

    A target needs no candidates of the policy, so neither denoising nor, where the critics read no features of the
    policy, an encoded next observation. The price is that V knows only what chunks of the data achieve.
    """

    # Which statistic of the logged chunks' values V becomes. An expectile feels how far away values are, a quantile
    # only how many values are higher.
    loss: Literal["quantile", "expectile"] = "quantile"
    # How high the statistic is: 0.5 is the median or the mean of the data, close to 1 is the best of the data.
    kappa: Annotated[float, Interval(gt=0, lt=1)] = 0.9
    # Hidden layers of V.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512)

    def create_networks(
        self,
        *,
        critic: CriticConfig,
        qchunking: QChunkingConfig,
        reader: ObservationReader,
        state_dim: int,
        rngs: nnx.Rngs,
    ) -> nnx.Module:
        return ValueNetwork(self.hidden_dims, reader, state_dim, 1, rngs)

    def value(self, networks: Networks) -> ValueNetwork:
        """V among the backup's own networks."""
        assert isinstance(networks.backup, ValueNetwork)
        return networks.backup

    def targets(
        self, algorithm: "Algorithm", networks: Networks, batch: Batch, draws: Draws, subset_rng: jax.Array
    ) -> Targets:
        features = networks.encode(batch.next_observations).features
        next_value = self.value(networks)(features, batch.next_observations)[:, 0]
        return Targets(value=td_target(batch, next_value, algorithm.acrlpd.discount))

    def advantage(self, view: "View") -> jax.Array:
        """Q(s, c) - V(s), for the logged chunks c [b]: positive for the best of the data, whatever the policy does.

        There are no candidates, so a policy that learns from advantages denoises nothing in an update.
        """
        q = view.values(jnp.asarray(view.batch.actions)[:, None])[:, 0]
        return q - self.value(view.fixed)(view.fixed_context.features, view.batch.observations)[:, 0]

    def losses(self, view: "View", targets: Targets, subset_rng: jax.Array) -> jax.Array:
        features, observation = view.fixed_context.features, view.batch.observations
        target = view.fixed.critics.target_ensemble
        chunk = view.algorithm.logged(view.batch)[:, None]
        q = target.aggregate_target(target(features, observation, chunk)[:, 0], subset_rng)
        error = q - self.value(view.networks)(features, observation)[:, 0]
        size = jnp.abs(error) if self.loss == "quantile" else jnp.square(error)
        return optimistic_weights(error, self.kappa) * size


def optimistic_weights(error: jax.Array, kappa: float) -> jax.Array:
    """|kappa - 1[error < 0]|: above 0.5, being too low costs more than being too high."""
    return jnp.where(error > 0, kappa, 1 - kappa)
