"""How state and data lie on the devices: openpi's FSDP rule, applied to the whole agent.

FSDP is a placement, not a second code path: the same train step is compiled with the shardings that are
chosen here, and XLA gathers what a layer needs when it needs it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from acrlpd.agents import Agent, Call, train_steps
from acrlpd.agents.agent import SMALL_NETWORK_OPTIONS
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.memory import split_axis
from acrlpd.process import compile_fast
from acrlpd.units import format_bytes

BATCH_AXIS = "batch"
FSDP_AXIS = "fsdp"
# Data is split over every device, also over those that share one copy of the parameters.
DATA_AXES = (BATCH_AXIS, FSDP_AXIS)
# A policy with fewer parameters counts as small.
_SMALL_NETWORK = 100_000_000


def create_fsdp_mesh(fsdp_devices: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices as (batch, fsdp): `fsdp_devices` of them share one copy of the large arrays."""
    count = jax.device_count() if devices is None else len(devices)
    if fsdp_devices < 1 or count % fsdp_devices:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"fsdp.fsdp_devices must divide the number of devices, {count}: choose one of {divisors}; "
            f"found {fsdp_devices}"
        )
    shape = (count // fsdp_devices, fsdp_devices)
    return jax.make_mesh(shape, DATA_AXES, axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


@dataclasses.dataclass(frozen=True)
class FSDPSharding:
    """The places of all arrays on one mesh."""

    mesh: Mesh
    # Every device keeps its own copy of arrays below this size.
    min_size_mib: float = 4.0

    @property
    def data(self) -> NamedSharding:
        """The place of a batch: its first axis is split over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXES))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def of_array(self, array: Any) -> NamedSharding:
        """Where one array lies; the plan counts with the same rule."""
        chosen = split_axis(array.shape, array.dtype.itemsize, self.mesh.shape[FSDP_AXIS], self.min_size_mib)
        if chosen is None:
            return self.replicated
        spec = [FSDP_AXIS if axis == chosen else None for axis in range(len(array.shape))]
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def abstract(self, tree: Any) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` that has a sharding for every array."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.of_array(x)), tree)


def create_sharding(rl_config: RLTrainConfig) -> FSDPSharding:
    """The placement that a config asks for, on all devices of the run."""
    return FSDPSharding(create_fsdp_mesh(rl_config.fsdp.fsdp_devices), rl_config.fsdp.min_size_mib)


def abstract_train_state(rl_config: RLTrainConfig, sharding: FSDPSharding) -> Agent:
    """Shapes, dtypes and places of a run's agent; nothing is allocated."""
    create = functools.partial(create_agent, rl_config, data_shards=sharding.mesh.size)
    return sharding.abstract(jax.eval_shape(create, jax.random.key(0)))


def init_fsdp_train_state(
    rl_config: RLTrainConfig,
    sharding: FSDPSharding,
    rng: jax.Array,
    policy_params: Mapping[str, Any] | None = None,
) -> Agent:
    """The agent of a run at step 0, created in its place: no device ever holds more than its share.

    `policy_params` are weights to start from, already in place; their buffers are used up. A config that names initial
    weights is refused without them.
    """
    if rl_config.weight_loader.kind != "none" and policy_params is None:
        raise ConfigError(
            f"weight_loader.kind={rl_config.weight_loader.kind} names initial weights, which this function does not "
            "read; acrlpd.training.initial_weights.create_initial_agent reads them"
        )
    alike = dataclasses.replace(rl_config, seed=0, exp_name="")
    return _compile_creation(alike, sharding)(rng, policy_params=policy_params)


# Programs that this process keeps, of each kind.
_MOST_PROGRAMS = 4


@functools.lru_cache(maxsize=_MOST_PROGRAMS)
def _compile_creation(rl_config: RLTrainConfig, sharding: FSDPSharding) -> Callable[..., Agent]:
    """`create_agent` as one program. Runs that differ in their seeds alone are created by the same program."""
    create = functools.partial(create_agent, rl_config, data_shards=sharding.mesh.size)
    places = jax.tree.map(sharding.of_array, jax.eval_shape(create, jax.random.key(0)))
    return jax.jit(create, out_shardings=places, donate_argnames="policy_params", compiler_options=compile_fast())


def compile_train_steps(
    agents: list[Agent],
    calls: list[Call],
    sharding: FSDPSharding,
    *,
    update_policy: bool = True,
    leaders: tuple[int, ...] | None = None,
) -> jax.stages.Compiled:
    """Compiles `train_steps` for the places of `agents` and feeds (arrays, or shapes with shardings).

    The result is called as (agents, calls, num_updates); the buffers of the agents that are passed in are used up. The
    result is compiled ahead of time: arrays of other shapes or in other places are an error, never a second compile.
    A later run of this process that needs the same program, such as a baseline, does not compile it again.
    """
    feeds = [call.feed for call in calls]
    arrays = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(feeds)]
    agent_arrays = [(x.shape, x.dtype) for x in jax.tree.leaves(agents)]
    key = (jax.tree.structure((agents, calls)), *arrays, *agent_arrays, sharding, update_policy, leaders)
    if key not in _programs:
        while len(_programs) >= _MOST_PROGRAMS:
            _programs.pop(next(iter(_programs)))
        step = functools.partial(train_steps, update_policy=update_policy, leaders=leaders)
        _programs[key] = _compile(step, agents, calls, sharding)
    return _programs[key]


# The train steps that this process has compiled last.
_programs: dict[Hashable, jax.stages.Compiled] = {}


def compiled_programs() -> list[jax.stages.Compiled]:
    """The train steps that this process has compiled last, the newest one last."""
    return list(_programs.values())


def _compile(
    train_steps: Callable[..., Any], agents: list[Agent], calls: list[Call], sharding: FSDPSharding
) -> jax.stages.Compiled:
    places = jax.tree.map(sharding.of_array, agents)
    feed_places = jax.tree.map(lambda x: x.sharding, [call.feed for call in calls])
    everywhere: Any = sharding.replicated
    call_places = [
        Call(feed, everywhere, everywhere, None if call.actor_weights is None else everywhere)
        for feed, call in zip(feed_places, calls, strict=True)
    ]
    feeds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), [c.feed for c in calls])
    shapes = [dataclasses.replace(call, feed=feed) for call, feed in zip(calls, feeds, strict=True)]
    step = jax.jit(
        train_steps,
        in_shardings=(places, call_places, sharding.replicated),
        out_shardings=(places, sharding.replicated),
        donate_argnums=0,
    )
    policy = agents[0].policy_params, agents[0].frozen_params
    is_small = sum(math.prod(x.shape) for x in jax.tree.leaves(policy)) < _SMALL_NETWORK
    with jax.set_mesh(sharding.mesh):  # Models use this mesh to keep their activations split by sample.
        lowered = step.lower(sharding.abstract(agents), shapes, np.int32(1))
        return lowered.compile(compiler_options=SMALL_NETWORK_OPTIONS if is_small else None)


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """The result of `validate_fsdp_sharding`; true when every array lies in its place."""

    total_bytes: int  # of the state, each array counted once
    device_bytes: int  # on the device that holds most
    misplaced: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.misplaced

    def __str__(self) -> str:
        text = (
            f"state {format_bytes(self.total_bytes)}, {format_bytes(self.device_bytes)} on each device "
            f"({self.device_bytes / self.total_bytes:.1%})"
        )
        return "\n  ".join([text, *self.misplaced])


def validate_fsdp_sharding(train_state: Any, sharding: FSDPSharding) -> ShardingReport:
    """Compares where the arrays of a state lie with where they should lie, and adds up their bytes."""
    misplaced = []
    total = device = 0
    for path, array in jax.tree_util.tree_flatten_with_path(train_state)[0]:
        wanted, found = sharding.of_array(array), getattr(array, "sharding", None)
        if found is None or not found.is_equivalent_to(wanted, len(array.shape)):
            name = jax.tree_util.keystr(path)
            misplaced.append(f"{name}: expected {wanted.spec}, found {getattr(found, 'spec', found)}")
        total += math.prod(array.shape) * array.dtype.itemsize
        device += math.prod((found or wanted).shard_shape(array.shape)) * array.dtype.itemsize
    return ShardingReport(total, device, tuple(misplaced))
