"""The agent with the attributes and methods of the seeds' `ACRLPDPi0Agent`, and the seeds' factories."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import optax
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.agents.improvements.base import Info
from acrlpd.agents.networks import CriticNetworks, TemperatureModule
from acrlpd.batch import Batch
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.config.create_agent import create_agent
from acrlpd.models.policy import FlowPolicy
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.sharding import create_sharding

# The arrays of the old agent stay valid, because code of the seeds reads the old agent after a step.
_train_step = jax.jit(Agent.train_step)
_compute_loss = jax.jit(Agent.compute_loss)

# The arguments of the seeds' constructor, and the fields of the config that they are.
_SETTINGS = {
    "num_action_samples": "acrlpd.num_action_samples",
    "horizon_length": "qchunking.horizon_length",
    "real_action_dim": "qchunking.action_dim",
    "discount": "acrlpd.discount",
    "target_update_rate": "acrlpd.target_update_tau",
    "bc_loss_weight": "acrlpd.loss_weights.bc_weight",
    "pi0_ema_decay": "acrlpd.ema_decay",
    "critic_ema_decay": "acrlpd.critic_ema_decay",
}


class OpenPITrainState(NamedTuple):
    """The policy alone, under the names of openpi's own train state."""

    step: int
    params: nnx.State
    model_def: nnx.GraphDef  # nnx.merge(model_def, params) is the policy
    opt_state: optax.OptState
    tx: optax.GradientTransformation
    ema_decay: float | None
    ema_params: nnx.State | None


class ACRLPDPi0Agent(Agent):
    """An `Agent` that also answers to the seeds' names; as a pytree it is the same."""

    rl_config: RLTrainConfig | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def config(self) -> RLTrainConfig:
        """The config that the agent was made from, which a checkpoint of the agent names."""
        if self.rl_config is None:
            raise ConfigError("the agent does not know its config: make it with create_acrlpd_pi0_agent_from_rl_config")
        return self.rl_config

    @property
    def num_action_samples(self) -> int:
        return self.algorithm.acrlpd.num_action_samples

    @property
    def horizon_length(self) -> int:
        return self.algorithm.qchunking.horizon_length

    @property
    def real_action_dim(self) -> int:
        return self.algorithm.qchunking.action_dim

    @property
    def discount(self) -> float:
        return self.algorithm.acrlpd.discount

    @property
    def target_update_tau(self) -> float:
        return self.algorithm.acrlpd.target_update_tau

    @property
    def q_aggregation(self) -> str:
        return self.critics.online_ensemble.config.q_aggregation

    @property
    def critic_weight(self) -> float:
        return float(self.loss_weights.critic_weight)

    @property
    def actor_weight(self) -> float:
        return float(self.loss_weights.actor_weight)

    @property
    def bc_weight(self) -> float:
        return float(self.loss_weights.bc_weight)

    @property
    def pi0_model(self) -> FlowPolicy:
        """The policy that learns, as a module with `sample_actions` and `compute_loss`."""
        return self.policy()

    @property
    def critic_networks(self) -> CriticNetworks:
        return self.critics

    @property
    def temperature_module(self) -> TemperatureModule:
        return self.networks().temperature

    def compute_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The weighted sum of all losses, and every metric by name; compiled."""
        return _compute_loss(self, batch, rng)

    def compute_critic_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The TD loss at the logged chunks; the seeds have Q at sampled actions, to which no reward belongs."""
        return self._one_loss("critic_loss", batch, rng)

    def compute_actor_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The loss of the policy improvement that the config names."""
        return self._one_loss("actor_loss", batch, rng)

    def compute_bc_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The flow-matching loss on the logged actions."""
        return self._one_loss("bc_loss", batch, rng)

    def _one_loss(self, name: str, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        _, info = self.compute_loss(batch, rng)
        if name not in info:
            raise ConfigError(f"this agent has no {name}: the weight of that loss is 0 in its config")
        return info[name], info

    def train_step(self, batch: Batch, rng: jax.Array) -> tuple["ACRLPDPi0Agent", Info]:  # type: ignore[override]
        """One update of everything that learns; compiled. This agent stays as it is."""
        return _train_step(self, batch, rng)

    def update_target_networks(self) -> "ACRLPDPi0Agent":
        """A soft update of the target critics. `train_step` has made its own."""
        return self.replace(critics=self.critics.soft_update_target_networks(self.target_update_tau))

    def create_openpi_train_state(self) -> OpenPITrainState:
        """The policy as openpi's trainer would hold it. The whole state is the agent itself."""
        return OpenPITrainState(
            step=int(self.step),
            params=self.served_params(average=False),
            model_def=self.policy_def,
            opt_state=self.policy_opt_state,
            tx=self.policy_optimizer.tx,
            ema_decay=self.algorithm.acrlpd.ema_decay,
            ema_params=None if self.ema_params is None else self.served_params(),
        )

    create_train_state = to_train_state = create_openpi_train_state

    def update_from_train_state(self, train_state: OpenPITrainState) -> "ACRLPDPi0Agent":
        """This agent with the step and the policy of an openpi train state; critics stay."""
        agent = self.with_policy_params(train_state.params, train_state.ema_params)
        return agent.replace(step=jax.numpy.asarray(train_state.step, self.step.dtype))

    def with_policy_params(self, params: nnx.State, average: nnx.State | None = None) -> "ACRLPDPi0Agent":
        """This agent with other weights of the policy; without an `average`, the average begins with the weights."""
        learned = _like(self.policy_params, params)
        frozen = _like(self.frozen_params, params)
        ema = None if self.ema_params is None else _like(self.ema_params, params if average is None else average)
        return self.replace(policy_params=learned, frozen_params=frozen, ema_params=ema)


def _like(template: nnx.State, params: nnx.State) -> nnx.State:
    """Copies of those arrays of `params` that `template` has, in the dtypes of `template`."""
    values = dict(nnx.to_flat_state(params))
    flat = {
        path: leaf.replace(jax.numpy.array(values[path].get_value(), leaf.get_value().dtype))
        for path, leaf in nnx.to_flat_state(template)
    }
    return nnx.from_flat_state(flat)


def as_seed_agent(agent: Agent, rl_config: RLTrainConfig) -> ACRLPDPi0Agent:
    """The same arrays with the seeds' names."""
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(Agent)}
    return ACRLPDPi0Agent(**fields, rl_config=rl_config)


def create_acrlpd_pi0_agent_from_rl_config(
    rl_config: RLTrainConfig,
    rng: jax.Array,
    pi0_opt_state: optax.OptState | None = None,
    critic_opt_state: optax.OptState | None = None,
    temp_opt_state: optax.OptState | None = None,
) -> ACRLPDPi0Agent:
    """The agent of a run at step 0, with the weights that the config names, in its place on the devices."""
    agent = as_seed_agent(create_initial_agent(rl_config, create_sharding(rl_config), rng), rl_config)
    return _with_opt_states(agent, pi0_opt_state, critic_opt_state, temp_opt_state)


def _with_opt_states(agent: ACRLPDPi0Agent, pi0: Any, critic: Any, temperature: Any) -> ACRLPDPi0Agent:
    """The agent with those states of optimizers that are given."""
    return agent.replace(
        policy_opt_state=agent.policy_opt_state if pi0 is None else pi0,
        critic_opt_state=agent.critic_opt_state if critic is None else critic,
        temperature_opt_state=agent.temperature_opt_state if temperature is None else temperature,
    )


def create_acrlpd_pi0_agent(
    pi0_model: FlowPolicy,
    critic_networks: CriticNetworks | None = None,
    *,
    rl_config: RLTrainConfig,
    rng: jax.Array | None = None,
    use_ema: bool = True,
    pi0_opt_state: optax.OptState | None = None,
    critic_opt_state: optax.OptState | None = None,
    temp_opt_state: optax.OptState | None = None,
    **settings: Any,
) -> ACRLPDPi0Agent:
    """An agent from networks that exist already. `rl_config` says how they are trained, which networks do not know.

    `settings` are the other arguments of the seeds' constructor, such as `discount`. Without `critic_networks` the
    critics are those of the config, with initial weights. A moving average of critics begins as a copy of them.
    """
    if unknown := settings.keys() - _SETTINGS:
        raise ConfigError(f"unknown settings {', '.join(sorted(unknown))}; known: {', '.join(_SETTINGS)}")
    changes = {_SETTINGS[name]: value for name, value in settings.items()}
    without_ema = {} if use_ema else {"acrlpd.ema_decay": None, "acrlpd.critic_ema_decay": None}
    rl_config = apply_config_overrides(rl_config, changes | without_ema)
    rng = jax.random.key(rl_config.seed) if rng is None else rng
    agent = create_agent(rl_config, rng, policy_params=nnx.to_pure_dict(nnx.state(pi0_model)))
    if critic_networks is not None:
        keeps_average, average = agent.critics.average is not None, critic_networks.average
        if keeps_average and average is None:
            average = jax.tree.map(jax.numpy.copy, critic_networks.online)
        agent = agent.replace(critics=critic_networks.replace(average=average if keeps_average else None))
    return _with_opt_states(as_seed_agent(agent, rl_config), pi0_opt_state, critic_opt_state, temp_opt_state)
