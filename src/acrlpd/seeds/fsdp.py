"""The seeds' functions around FSDP. Placement is one rule for all arrays: `acrlpd.training.sharding`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, Sharding

from acrlpd.agents import Agent, Call
from acrlpd.agents.improvements.base import Info
from acrlpd.agents.optimizers.base import create_optimizer
from acrlpd.batch import Batch, StackedBatches
from acrlpd.config import ConfigError, QChunkingConfig, RLTrainConfig, apply_config_overrides
from acrlpd.config.plan.accelerators import find_device_memory
from acrlpd.config.plan.plan import make_plan
from acrlpd.models.families.base import PolicyConfig
from acrlpd.seeds.agent import ACRLPDPi0Agent, as_seed_agent
from acrlpd.training import sharding as fsdp
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.sharding import FSDPSharding, ShardingReport, compile_train_steps

TrainStep = Callable[[Agent, Batch, jax.Array], tuple[Any, Info]]
# The seeds' largest number of devices that share one copy: those of one machine.
_DEVICES_OF_A_NODE = 8


def create_fsdp_mesh(fsdp_devices: int | None = None, data_parallel_devices: int | None = None) -> Mesh:
    """The devices as (batch, fsdp). By default up to 8 devices share one copy of the large arrays."""
    if fsdp_devices is None:
        fsdp_devices = int(np.gcd(jax.device_count(), _DEVICES_OF_A_NODE))
    if data_parallel_devices is None:
        return fsdp.create_fsdp_mesh(fsdp_devices)
    wanted = fsdp_devices * data_parallel_devices
    if wanted > jax.device_count():
        raise ConfigError(
            f"{data_parallel_devices} x {fsdp_devices} devices are asked for, and {jax.device_count()} are here"
        )
    return fsdp.create_fsdp_mesh(fsdp_devices, jax.devices()[:wanted])


def create_fsdp_sharding_strategy(mesh: Mesh, model_config: Any = None) -> tuple[NamedSharding, NamedSharding]:
    """The places of batches and of replicated arrays. They do not depend on the model."""
    return FSDPSharding(mesh).data, FSDPSharding(mesh).replicated


def setup_fsdp_sharding(train_state: Any, mesh: Mesh | None = None) -> Any:
    """The state with every array in its place: critics and optimizers follow the same rule as the policy."""
    places = jax.tree.map(_places_of(train_state, mesh or create_fsdp_mesh()).of_array, train_state)
    return jax.device_put(train_state, places)


def _places_of(train_state: Any, mesh: Mesh) -> FSDPSharding:
    """The places on a mesh that the config of an agent asks for; openpi's own for a state without a config."""
    rl_config = getattr(train_state, "rl_config", None)
    return FSDPSharding(mesh) if rl_config is None else FSDPSharding(mesh, rl_config.fsdp.min_size_mib)


def create_global_optimizers(
    rl_config: RLTrainConfig,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """The optimizers of policy and critics. Asked again, the function returns the same ones."""
    policy = create_optimizer(rl_config.actor_optimizer, rl_config.actor_lr_schedule)
    return policy.tx, create_optimizer(rl_config.critic_optimizer, rl_config.critic_lr_schedule).tx


def init_fsdp_train_state(
    rl_config: RLTrainConfig, mesh: Mesh, rng: jax.Array, global_optimizers: Any = None
) -> tuple[ACRLPDPi0Agent, Any]:
    """The agent at step 0, created in its place, and the places of its arrays.

    The agent makes its own optimizers from the config, so those of the caller are not needed.
    """
    places = FSDPSharding(mesh, rl_config.fsdp.min_size_mib)
    agent = as_seed_agent(create_initial_agent(rl_config, places, rng), rl_config)
    return agent, jax.tree.map(places.of_array, agent)


def init_acrlpd_fsdp_training(
    rl_config: RLTrainConfig,
    mesh: Mesh,
    rng: jax.Array,
    data_sharding: Sharding | None = None,
    step: int = 0,
    global_pi0_tx: optax.GradientTransformation | None = None,
    global_critic_tx: optax.GradientTransformation | None = None,
) -> tuple[ACRLPDPi0Agent, Any, Callable[[], TrainStep]]:
    """As `init_fsdp_train_state`; the third result makes the compiled train step when it is called."""
    agent, places = init_fsdp_train_state(rl_config, mesh, rng)
    agent = agent.replace(step=agent.step + step)
    return agent, places, lambda: create_fsdp_train_step_fn(agent, mesh, data_sharding)


def create_fsdp_train_step_fn(agent: Agent, mesh: Mesh, data_sharding: Sharding | None = None) -> TrainStep:
    """One update as a run makes it: compiled once for the places of agent and batch. It uses up the agent's arrays."""
    places = _places_of(agent, mesh)

    def train_step(agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, Info]:
        batch = jax.device_put(batch, data_sharding or places.data)
        weights = np.asarray(agent.loss_weights.bc_weight, np.float32)[None]
        call = Call(StackedBatches(batch), weights, rng)
        agents, table = compile_train_steps([agent], [call], places)([agent], [call], np.int32(1))
        return agents[0], dict(table.rows(1)[0])

    return train_step


def validate_fsdp_sharding(train_state: Any, mesh: Mesh) -> ShardingReport:
    """Where the arrays lie; true if every array lies where FSDP puts it."""
    return fsdp.validate_fsdp_sharding(train_state, _places_of(train_state, mesh))


def optimize_fsdp_memory(
    batch_size: int,
    model_config: RLTrainConfig | PolicyConfig,
    available_devices: int,
    device_memory_gib: float | None = None,
) -> dict[str, Any]:
    """The smallest change with which a batch fits into memory, by the plan; empty if the batch fits as it is.

    `model_config` is a whole config, or a model for which everything else has its default. The memory is that of the
    devices of this machine, unless it is given.
    """
    if isinstance(model_config, PolicyConfig):
        chunks = QChunkingConfig(model_config.action_horizon, model_config.action_dim)
        model_config = RLTrainConfig("memory", model=model_config, qchunking=chunks)
    config = apply_config_overrides(model_config, batch_size=batch_size)
    if device_memory_gib is None:
        device_memory_gib = find_device_memory()
    plan = make_plan(config, num_devices=available_devices, device_memory_gib=device_memory_gib)
    if plan.suggestion is None:
        raise ConfigError(plan.verdict)
    return plan.suggestion
