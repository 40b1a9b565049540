"""The agent: policy, critics, temperature and their optimizers as one immutable pytree, and its one step.

`Agent.train_step` is the step. `train_step` is the same, compiled for one batch, for tests and for trying things out.
`train_steps` makes many steps in one call, and is what a run compiles.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from acrlpd.agents import algorithm
from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.improvements.base import Info
from acrlpd.agents.metrics import NOT_COMPUTED
from acrlpd.agents.networks import CriticNetworks, Networks, OwnNetworks, Params, Prepared, move_average
from acrlpd.agents.optimizers.base import Optimizer
from acrlpd.batch import Batch, Feed
from acrlpd.models.policy import FlowPolicy


class Agent(flax.struct.PyTreeNode):
    """Everything that learns, and how.

    Trainable parameters of the policy are float32 and have optimizer state and a moving average. Frozen parameters are
    bfloat16, without optimizer state and average. Static fields are hashable and equal for equal configs.
    """

    step: jax.Array  # int32 [] updates so far, skipped ones included
    skipped_updates: jax.Array  # int32 [] updates that were skipped because a gradient was not finite

    policy_params: nnx.State
    frozen_params: nnx.State
    ema_params: nnx.State | None
    policy_opt_state: optax.OptState

    critics: CriticNetworks
    critic_opt_state: optax.OptState

    temperature_params: nnx.State
    temperature_opt_state: optax.OptState

    improvement: OwnNetworks
    backup: OwnNetworks

    loss_weights: LossWeights  # float32 [] each; replace them to follow a schedule

    policy_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    temperature_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    algorithm: Algorithm = flax.struct.field(pytree_node=False)
    policy_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    critic_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    temperature_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    gradient_accumulation_steps: int = flax.struct.field(pytree_node=False, default=1)

    # -- networks ------------------------------------------------------------------------------------

    def policy(self) -> FlowPolicy:
        """The policy that learns, as a module."""
        return nnx.merge(self.policy_def, self.policy_params, self.frozen_params)

    def networks(self, params: Params | None = None) -> Networks:
        """The networks as modules, at the given parameters; a part that is None keeps the agent's own."""
        params = params or Params()
        policy = self.policy_params if params.policy is None else params.policy
        critic = self.critics.online if params.critic is None else params.critic
        temperature = self.temperature_params if params.temperature is None else params.temperature
        return Networks(
            policy=nnx.merge(self.policy_def, policy, self.frozen_params),
            critics=self.critics.replace(online=critic),
            temperature=nnx.merge(self.temperature_def, temperature),
            improvement=self.improvement.module(params.improvement),
            backup=self.backup.module(params.backup),
        )

    # -- learning: algorithm.py ----------------------------------------------------------------------

    def compute_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The loss that `train_step` would report for the same key; nothing is updated."""
        return algorithm.compute_loss(self, batch, jax.random.fold_in(rng, self.step))

    def train_step(self, batch: Batch, rng: jax.Array, *, update_policy: bool = True) -> tuple["Agent", Info]:
        """One update of everything that learns; see `algorithm.update`.

        The key of the update is `rng` folded with the agent's step, so one key serves a whole run.
        """
        return algorithm.update(self, self.prepare(batch, rng), update_policy=update_policy)

    def prepare(self, batch: Batch, rng: jax.Array) -> Prepared:
        """What `train_step` computes before it looks at a network or a reward."""
        return algorithm.prepare(self, batch, jax.random.fold_in(rng, self.step))

    def update_ema_parameters(self, *, enabled: jax.Array | bool = True) -> "Agent":
        """EMA <- d EMA + (1 - d) policy, if the agent keeps an average."""
        decay = self.algorithm.acrlpd.ema_decay
        if decay is None or self.ema_params is None:
            return self
        return self.replace(ema_params=move_average(self.ema_params, self.policy_params, decay, enabled=enabled))

    def with_policy_of(self, other: "Agent") -> "Agent":
        """This agent with everything that cloning has changed in another agent; critics and counters stay."""
        return self.replace(
            step=other.step,
            policy_params=other.policy_params,
            frozen_params=other.frozen_params,
            ema_params=other.ema_params,
            policy_opt_state=other.policy_opt_state,
        )

    # -- acting: policies/ ---------------------------------------------------------------------------

    def served_params(self, *, average: bool = True) -> nnx.State:
        """The whole policy under openpi's names: the moving average if the agent keeps one, else what learns."""
        params = self.ema_params if average and self.ema_params is not None else self.policy_params
        return nnx.merge_state(params, self.frozen_params)


# The buffers of the agent that is passed in are used up.
train_step = jax.jit(Agent.train_step, static_argnames="update_policy", donate_argnames="self")

# Compiler options for networks whose kernels take microseconds on a GPU. cuBLASLt applies bias and GELU while it writes
# a product; after a product of Triton, a second kernel does this and takes as long as the product. Independent kernels
# run side by side. Other backends accept these options and ignore them.
SMALL_NETWORK_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_cublaslt": True,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}


@flax.struct.dataclass
class Call:
    """What one run brings to a call of `train_steps`."""

    feed: Feed
    bc_weights: jax.Array | np.ndarray  # float32 [capacity] the weight of the cloning loss in each update
    rng: jax.Array  # the key of the run
    # float32 [capacity] the weight of the policy improvement in each update; None: that of the agent
    actor_weights: jax.Array | np.ndarray | None = None

    def scheduled_weights(self, index: jax.Array) -> dict[str, Any]:
        """The weights of losses that a schedule may move, in one update of the call, by their names."""
        weights = {"bc_weight": self.bc_weights[index]}
        return weights if self.actor_weights is None else weights | {"actor_weight": self.actor_weights[index]}


@flax.struct.dataclass
class MetricsTable:
    """The metrics of the updates of one call in one array, because fetching many small arrays takes long."""

    values: jax.Array  # float32 [runs, capacity, metrics]; rows beyond the last update of the call are 0
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)

    def rows(self, num_updates: int, run: int = 0) -> list[dict[str, float]]:
        """The metrics that each update of a run computed, by name; waits until the devices have computed them.

        JAX keeps the fetched values, so the values are fetched once for all runs.
        """
        values = jax.device_get(self.values)[run, :num_updates].tolist()
        rows = [dict(zip(self.names, row, strict=True)) for row in values]
        return [{name: value for name, value in row.items() if value != NOT_COMPUTED} for row in rows]


def train_steps(
    agents: list[Agent],
    calls: list[Call],
    num_updates: jax.Array,
    *,
    update_policy: bool = True,
    leaders: Sequence[int] | None = None,
) -> tuple[list[Agent], MetricsTable]:
    """`num_updates` updates of each agent in one call: the same result, to the last bit, as calls of one update each.

    The number is an argument of the compiled program, so calls of any length up to the feeds' capacity share one
    program. The agents of several runs without a common leader do not depend on each other. The updates of all runs
    stand side by side in the loop, because matrix products of stacked agents are slower
    (benchmarks/small_policies-2026-11-16.md).

    `leaders` names for each run the run whose policy and transitions are equal to its own; None: its own. An update
    then reads both from the leader. So the compiler finds the same samples, losses and gradients of the policy in
    several runs, and keeps one of each. An update that the leader skips is skipped by the policy of all of them.
    """
    leaders = range(len(agents)) if leaders is None else leaders

    @jax.jit  # the shapes of the metrics, and then the loop, without tracing the update again for each run
    def update(agent: Agent, prepared: Prepared, scheduled: dict[str, Any]) -> tuple[Agent, dict[str, jax.Array]]:
        weights = dataclasses.replace(agent.loss_weights, **scheduled)  # the agent has its weights as arrays
        return algorithm.update(agent.replace(loss_weights=weights), prepared, update_policy=update_policy)

    def update_all(agents: list[Agent], index: jax.Array) -> list[tuple[Agent, dict[str, jax.Array]]]:
        batches = [call.feed.batch(index) for call in calls]
        prepared = {run: agents[run].prepare(batches[run], calls[run].rng) for run in dict.fromkeys(leaders)}
        return [
            update(
                agents[run].with_policy_of(agents[leader]),
                prepared[leader].with_rewards_of(batches[run]),
                calls[leader].scheduled_weights(index),
            )
            for run, leader in enumerate(leaders)
        ]

    def take_policies(agents: list[Agent]) -> list[Agent]:
        return [agent.with_policy_of(agents[leader]) for agent, leader in zip(agents, leaders, strict=True)]

    first, capacity = jnp.zeros((), jnp.int32), calls[0].feed.capacity
    if capacity == 1:  # a program without a loop: a large network has no memory to spare for one
        results = update_all(agents, first)
        table = jnp.stack([_row(info)[None] for _, info in results])
        return take_policies([agent for agent, _ in results]), MetricsTable(table, tuple(results[0][1]))
    names = tuple(jax.eval_shape(update_all, agents, first)[0][1])

    def body(index: jax.Array, carry: tuple[list[Agent], jax.Array]) -> tuple[list[Agent], jax.Array]:
        results = update_all(carry[0], index)
        rows = jnp.stack([_row(info) for _, info in results])
        # The loop carries the policy of a leader alone: the others keep theirs until the loop has ended.
        updated = [
            new if leader == run else new.with_policy_of(old)
            for run, (leader, old, (new, _)) in enumerate(zip(leaders, carry[0], results, strict=True))
        ]
        return updated, carry[1].at[:, index].set(rows)

    table = jnp.zeros((len(agents), capacity, len(names)), jnp.float32)
    agents, table = jax.lax.fori_loop(first, num_updates, body, (agents, table))
    return take_policies(agents), MetricsTable(table, names)


def _row(info: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.stack([jnp.asarray(value, jnp.float32) for value in info.values()])
