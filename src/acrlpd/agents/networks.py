"""The networks and the random numbers of one update."""

import dataclasses
import math
from typing import NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig, CriticEnsemble, ObservationReader
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.batch import Batch
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy, draw_noise

_Module = TypeVar("_Module", bound=nnx.Module)
_Times = TypeVar("_Times", jax.Array, np.ndarray)


class CriticNetworks(flax.struct.PyTreeNode):
    """Online and target parameters of one ensemble, and their moving average if there is one: an immutable pytree."""

    online: nnx.State
    target: nnx.State
    network: nnx.GraphDef = flax.struct.field(pytree_node=False)
    average: nnx.State | None = None

    @property
    def online_ensemble(self) -> CriticEnsemble:
        return nnx.merge(self.network, self.online)

    @property
    def target_ensemble(self) -> CriticEnsemble:
        return nnx.merge(self.network, self.target)

    @property
    def acting(self) -> nnx.State:
        """The parameters that choose among candidates when the policy acts: the moving average if there is one."""
        return self.online if self.average is None else self.average

    @property
    def uses_features(self) -> bool:
        """Whether these critics read the policy's features."""
        return self.online_ensemble.reader.reads_features

    def soft_update_target_networks(self, tau: float | jax.Array) -> "CriticNetworks":
        """target <- (1 - tau) * target + tau * online."""
        target = jax.tree.map(lambda old, new: (1 - tau) * old + tau * new, self.target, self.online)
        return self.replace(target=target)

    def update_average(self, decay: float | None, *, enabled: jax.Array | bool) -> "CriticNetworks":
        """average <- d average + (1 - d) online, if the critics keep an average."""
        if decay is None or self.average is None:
            return self
        return self.replace(average=move_average(self.average, self.online, decay, enabled=enabled))


def move_average(average: nnx.State, learned: nnx.State, decay: float, *, enabled: jax.Array | bool) -> nnx.State:
    """d average + (1 - d) learned; the average as it is if the update is not enabled."""
    keep, add = jnp.where(enabled, decay, 1.0), jnp.where(enabled, 1 - decay, 0.0)
    return jax.tree.map(lambda old, new: keep * old + add * new, average, learned)


def create_critic_networks(
    config: CriticConfig,
    rng: jax.Array,
    *,
    feature_dim: int,
    state_dim: int,
    chunk_dim: int,
    image_keys: tuple[str, ...] = (),
) -> CriticNetworks:
    """Fresh critics whose target starts as a copy of the online ensemble."""
    rngs = nnx.Rngs(rng)
    reader = ObservationReader(config, feature_dim=feature_dim, image_keys=image_keys, rngs=rngs)
    ensemble = config.create(reader=reader, state_dim=state_dim, chunk_dim=chunk_dim, rngs=rngs)
    network, online = nnx.split(ensemble)
    return CriticNetworks(online=online, target=jax.tree.map(jnp.copy, online), network=network)


class OwnNetworks(flax.struct.PyTreeNode):
    """The networks that an improvement or a backup brings along, with the state of their optimizer; most bring none."""

    params: nnx.State
    opt_state: optax.OptState
    network: nnx.GraphDef | None = flax.struct.field(pytree_node=False)

    @property
    def learns(self) -> bool:
        return bool(jax.tree.leaves(self.params))

    def module(self, params: nnx.State | None) -> nnx.Module | None:
        """The networks as one module, at the given parameters; None: at their own."""
        if self.network is None:
            return None
        return nnx.merge(self.network, self.params if params is None else params)


class TemperatureModule(nnx.Module):
    """alpha = exp(log_alpha), positive by construction."""

    def __init__(self, initial_temperature: float):
        if not (initial_temperature > 0 and math.isfinite(initial_temperature)):
            raise ValueError(f"initial_temperature must be positive; found {initial_temperature}")
        self.log_alpha = nnx.Param(jnp.asarray(math.log(initial_temperature), jnp.float32))

    def __call__(self) -> jax.Array:
        return jnp.exp(self.log_alpha[...])

    def alpha_loss(self, entropy: jax.Array, target_entropy: float) -> jax.Array:
        """Lowers alpha while the policy is more diverse than wanted, and raises alpha in the other case."""
        return self() * jax.lax.stop_gradient(entropy - target_entropy)

    def actor_loss(self, log_prob: jax.Array, value: jax.Array, target_entropy: float) -> jax.Array:
        """Soft actor-critic: alpha log pi - Q, which does not train alpha, and the loss of alpha."""
        alpha = jax.lax.stop_gradient(self())
        return alpha * log_prob - value + self.alpha_loss(-log_prob, target_entropy)


@flax.struct.dataclass
class Params:
    """The parameters that learn in an update; a part that is None does not learn."""

    policy: nnx.State | None = None
    critic: nnx.State | None = None
    temperature: nnx.State | None = None
    improvement: nnx.State | None = None
    backup: nnx.State | None = None


@dataclasses.dataclass(frozen=True)
class Networks:
    """The networks as modules."""

    policy: FlowPolicy
    critics: CriticNetworks
    temperature: TemperatureModule
    improvement: nnx.Module | None  # the improvement's own networks, if the improvement has any
    backup: nnx.Module | None  # the backup's own networks, if the backup has any

    def without_gradient(self) -> "Networks":
        """The same networks, for sampling and judging without learning from either."""
        return Networks(
            policy=_stop_gradient(self.policy),
            critics=jax.lax.stop_gradient(self.critics),
            temperature=_stop_gradient(self.temperature),
            improvement=None if self.improvement is None else _stop_gradient(self.improvement),
            backup=None if self.backup is None else _stop_gradient(self.backup),
        )

    def own(self, kind: type[_Module]) -> _Module:
        """The improvement's own networks, for the improvement, which knows their class."""
        assert isinstance(self.improvement, kind)
        return self.improvement

    def encode(self, observation: Observation) -> Context:
        """The policy's context, with features only where the critics want them."""
        return self.policy.encode(observation, features=self.critics.uses_features)


def _stop_gradient(module: _Module) -> _Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.lax.stop_gradient(state))


@flax.struct.dataclass
class Draws:
    """Random numbers for the whole batch, so that splitting the batch into micro-batches changes nothing."""

    flow_noise: jax.Array  # [b, T, a] of the flow-matching losses on logged actions
    flow_time: jax.Array  # [b]
    actor_noise: jax.Array  # [b, T, a] of another flow-matching loss, for an improvement
    actor_time: jax.Array  # [b]
    next_noise: jax.Array  # [b, N, T, a] of candidates at s'
    candidate_noise: jax.Array  # [b, N, T, a] of candidates at s
    dropout_keys: jax.Array  # [b]
    label_noise: jax.Array  # [b] in [0, 1): which prompts keep their label


def draw(rng: jax.Array, batch: Batch, hyperparams: ACRLPDHyperparams) -> Draws:
    b, *chunk_shape = batch.actions.shape
    candidates_shape = (b, hyperparams.num_action_samples, *chunk_shape)
    noise_rng, time_rng, next_rng, candidate_rng, dropout_rng = jax.random.split(rng, 5)
    noise = draw_noise(noise_rng, (b, 2, *chunk_shape))
    time = flow_times(jax.random.uniform(time_rng, (b, 2)), hyperparams)
    return Draws(
        flow_noise=noise[:, 0],
        flow_time=time[:, 0],
        actor_noise=noise[:, 1],
        actor_time=time[:, 1],
        next_noise=draw_noise(next_rng, candidates_shape),
        candidate_noise=draw_noise(candidate_rng, candidates_shape),
        dropout_keys=jax.random.split(dropout_rng, b),
        label_noise=jax.random.uniform(jax.random.fold_in(rng, 5), (b,)),
    )


def flow_times(uniform: _Times, hyperparams: ACRLPDHyperparams) -> _Times:
    """Times at which flows are compared, from random numbers between 0 and 1."""
    if hyperparams.flow_times == "uniform":
        return uniform
    # openpi's Beta(1.5, 1) by its inverse distribution function. `jax.random.beta` is a rejection loop, which takes
    # longer than the whole update of a small policy.
    return uniform ** (1 / 1.5) * 0.999 + 0.001


class Prepared(NamedTuple):
    """What an update needs beside the agent."""

    batch: Batch  # with observations as the policy wants them
    draws: Draws  # all random numbers of the update, apart from the key below
    subset_rng: jax.Array  # the key of the critics' subset

    @property
    def inputs(self) -> tuple[Batch, Draws]:
        """What may be split into micro-batches."""
        return self.batch, self.draws

    def with_rewards_of(self, batch: Batch) -> "Prepared":
        """The same update on a batch of the same windows with other rewards."""
        return self._replace(batch=batch.with_transitions_of(self.batch))
