"""The networks of one update, at the parameters that the update is taken at."""

import dataclasses
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig, CriticEnsemble
from acrlpd.agents.temperature import TemperatureModule
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy

_Module = TypeVar("_Module", bound=nnx.Module)


class CriticNetworks(flax.struct.PyTreeNode):
    """Online and target parameters of one ensemble: an immutable pytree."""

    online: nnx.State
    target: nnx.State
    network: nnx.GraphDef = flax.struct.field(pytree_node=False)

    @property
    def online_ensemble(self) -> CriticEnsemble:
        return nnx.merge(self.network, self.online)

    @property
    def target_ensemble(self) -> CriticEnsemble:
        return nnx.merge(self.network, self.target)

    @property
    def uses_features(self) -> bool:
        """Whether the policy's features are worth pooling for these critics."""
        return self.online_ensemble.feature_dim > 0

    def soft_update_target_networks(self, tau: float | jax.Array) -> "CriticNetworks":
        """target <- (1 - tau) * target + tau * online."""
        target = jax.tree.map(lambda old, new: (1 - tau) * old + tau * new, self.target, self.online)
        return self.replace(target=target)


def create_critic_networks(
    config: CriticConfig, rng: jax.Array, *, feature_dim: int, state_dim: int, chunk_dim: int
) -> CriticNetworks:
    """Fresh critics whose target starts as a copy of the online ensemble."""
    ensemble = config.create(feature_dim=feature_dim, state_dim=state_dim, chunk_dim=chunk_dim, rngs=nnx.Rngs(rng))
    network, online = nnx.split(ensemble)
    return CriticNetworks(online=online, target=jax.tree.map(jnp.copy, online), network=network)


@flax.struct.dataclass
class Params:
    """What gradients are taken of; a part that is None does not learn in this update."""

    policy: nnx.State | None = None
    critic: nnx.State | None = None
    temperature: nnx.State | None = None
    improvement: nnx.State | None = None


@dataclasses.dataclass(frozen=True)
class Networks:
    """The networks as modules."""

    policy: FlowPolicy
    critics: CriticNetworks
    temperature: TemperatureModule
    improvement: nnx.Module | None  # the improvement's own networks, if the improvement has any

    def without_gradient(self) -> "Networks":
        """The same networks, for sampling and judging without learning from either."""
        return Networks(
            policy=_stop_gradient(self.policy),
            critics=jax.lax.stop_gradient(self.critics),
            temperature=_stop_gradient(self.temperature),
            improvement=None if self.improvement is None else _stop_gradient(self.improvement),
        )

    def encode(self, observation: Observation) -> Context:
        """The policy's context, with features only where the critics want them."""
        return self.policy.encode(observation, features=self.critics.uses_features)


def _stop_gradient(module: _Module) -> _Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.lax.stop_gradient(state))
