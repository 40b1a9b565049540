"""The learner: the agents of one or several runs on the devices, and the compiled train step that updates them.

Runs whose configs differ only in the seed compute the same program with other numbers. The learner of several runs
stacks their agents, and one call of the program updates all of them. A small network leaves most of a device idle, so
four runs take little more time than one run.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.agents import Agent, MetricsTable, train_steps
from acrlpd.batch import Feed
from acrlpd.training.sharding import FSDPSharding, compile_step, compile_train_steps


@dataclasses.dataclass(frozen=True)
class Call:
    """What one run brings to a call of the train step."""

    feed: Feed
    bc_weights: np.ndarray  # float32 [capacity]
    rng: jax.Array  # the key of the run


class CallMetrics(Protocol):
    """The metrics of one run's updates in one call, which the devices may still be computing."""

    def rows(self, num_updates: int) -> list[dict[str, float]]:
        """The metrics of each update by name; waits until the devices have computed them."""


class Learner:
    """Holds the agents of the runs, which are numbered from 0, and updates them together.

    All runs need configs of one shape: the same networks, batch size and optimizers.
    """

    def __init__(self, sharding: FSDPSharding, num_runs: int = 1) -> None:
        if num_runs > 1 and sharding.is_split:
            raise ValueError("several runs in one program need fsdp.fsdp_devices=1: their agents are small")
        self.sharding = sharding
        self.num_runs = num_runs
        # The compiled programs, by whether the policy is updated. They are empty before the first call.
        self.programs: dict[bool, jax.stages.Compiled] = {}
        self.feed_shapes: list[tuple[int, ...]] = []  # those that the programs are compiled for
        # The agents that are not part of the stack: those that wait, and the agent of a learner of one run.
        self._agents: dict[int, Agent] = {}
        self._stack: Agent | None = None
        self._feeds = _FeedStack()

    def agent(self, run: int) -> Agent:
        """The agent of a run as it is now. Taking an agent out of the stack copies the agent."""
        return self._agents[run] if run in self._agents else _take(self._stack, np.int32(run))

    def put(self, run: int, agent: Agent) -> None:
        """Replaces the agent of a run."""
        self._agents[run] = agent

    def is_compiled_for(self, calls: Sequence[Call]) -> bool:
        """Whether there are programs for feeds of these shapes; the shapes change when a replay outgrows its place."""
        return self.feed_shapes == _shapes(self._join_feeds(calls))

    def compile(self, calls: Sequence[Call], kinds: Collection[bool]) -> None:
        """Compiles the programs for calls like these, one of each run; `kinds` says whether they update the policy."""
        feed = self._join_feeds(calls)
        is_alone = self.num_runs == 1
        agent = self.agent(0) if is_alone else self._gather(range(self.num_runs))
        compile_one: Callable[..., jax.stages.Compiled] = compile_train_steps if is_alone else _compile_joint_steps
        self.programs = {kind: compile_one(agent, feed, self.sharding, update_policy=kind) for kind in sorted(kinds)}
        self.feed_shapes = _shapes(feed)

    def update(
        self, calls: Sequence[Call], active: Collection[int], num_updates: int, *, update_policy: bool
    ) -> dict[int, CallMetrics]:
        """Starts `num_updates` updates of each active run in one call, which has a place for each run.

        The agents of the other runs wait. Their places compute something that is not used, so that what an active run
        computes does not depend on which runs wait.
        """
        program, feed, count = self.programs[update_policy], self._join_feeds(calls), np.int32(num_updates)
        if self.num_runs == 1:
            self._agents[0], table = program(self._agents[0], feed, count, calls[0].bc_weights, calls[0].rng)
            return {0: table}
        weights = np.stack([call.bc_weights for call in calls])
        self._stack, table = program(
            self._gather(active), feed, count, weights, self._feeds.stack_keys([call.rng for call in calls])
        )
        fetched = _FetchedTable(table)
        return {run: _RowsOfRun(fetched, run) for run in active}

    def _join_feeds(self, calls: Sequence[Call]) -> Any:
        return calls[0].feed if self.num_runs == 1 else self._feeds.stack([call.feed for call in calls])

    def _gather(self, active: Collection[int]) -> Agent:
        """The stack, with the agents of the active runs in their places and copies of the other agents put aside."""
        for run in range(self.num_runs):
            if run not in active and run not in self._agents:
                self._agents[run] = self.agent(run)
        if any(run in self._agents for run in active):
            self._stack = _stack([self.agent(run) for run in range(self.num_runs)])
            self._agents = {run: agent for run, agent in self._agents.items() if run not in active}
        assert self._stack is not None
        return self._stack


class _FeedStack:
    """Joins the feeds of several runs: arrays that all runs share stay as they are, the others are stacked.

    A replay's rows change rarely, so stacked arrays are kept until one of their parts changes.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[tuple[jax.Array, ...], jax.Array]] = {}

    def stack(self, feeds: Sequence[Feed]) -> "JointFeed":
        columns = list(zip(*map(jax.tree.leaves, feeds), strict=True))
        lasting = {id(array) for array in jax.tree.leaves(feeds[0].lasting)}
        is_shared = tuple(
            id(column[0]) in lasting and all(array is column[0] for array in column) for column in columns
        )
        fresh = {
            index: column
            for index, column in enumerate(columns)
            if not is_shared[index] and not self._is_kept(index, column)
        }
        for index, array in _stack_columns(fresh).items():
            self._kept[index] = fresh[index], array
        own = [self._kept[index][1] for index in range(len(columns)) if not is_shared[index]]
        shared = [column[0] for index, column in enumerate(columns) if is_shared[index]]
        return JointFeed(shared, own, feeds[0].capacity, is_shared, jax.tree.structure(feeds[0]))

    def stack_keys(self, keys: Sequence[jax.Array]) -> jax.Array:
        if not self._is_kept("keys", keys):
            self._kept["keys"] = tuple(keys), jnp.stack(keys)
        return self._kept["keys"][1]

    def _is_kept(self, index: Any, column: Sequence[jax.Array]) -> bool:
        kept = self._kept.get(index)
        return kept is not None and all(old is new for old, new in zip(kept[0], column, strict=True))


class JointFeed(flax.struct.PyTreeNode):
    """The feeds of several runs in one pytree."""

    shared: list[jax.Array]
    own: list[jax.Array]  # each with a leading axis [runs]
    capacity: int = flax.struct.field(pytree_node=False)
    is_shared: tuple[bool, ...] = flax.struct.field(pytree_node=False)  # in the order of a feed's leaves
    structure: jax.tree_util.PyTreeDef = flax.struct.field(pytree_node=False)  # of a feed

    def of_run(self, own: Sequence[jax.Array]) -> Feed:
        """The feed of one run, whose own arrays are given."""
        shared_arrays, own_arrays = iter(self.shared), iter(own)
        return jax.tree.unflatten(self.structure, [next(shared_arrays if s else own_arrays) for s in self.is_shared])


def _joint_steps(
    agents: Agent,
    feed: JointFeed,
    num_updates: jax.Array,
    bc_weights: jax.Array,
    rngs: jax.Array,
    *,
    update_policy: bool,
) -> tuple[Agent, MetricsTable]:
    """`train_steps` for every run, over the leading axis [runs]."""

    def steps(agent: Agent, own: list[jax.Array], bc_weights: jax.Array, rng: jax.Array) -> tuple[Agent, MetricsTable]:
        return train_steps(agent, feed.of_run(own), num_updates, bc_weights, rng, update_policy=update_policy)

    return jax.vmap(steps)(agents, feed.own, bc_weights, rngs)


def _compile_joint_steps(
    agents: Agent, feed: JointFeed, sharding: FSDPSharding, *, update_policy: bool
) -> jax.stages.Compiled:
    steps = functools.partial(_joint_steps, update_policy=update_policy)
    num_runs = agents.step.shape[0]
    others = np.zeros((num_runs, feed.capacity), np.float32), jax.random.split(jax.random.key(0), num_runs)
    return compile_step(steps, agents, jax.tree.map(lambda x: x.sharding, agents), feed, sharding, *others)


def _stack_columns(columns: dict[int, tuple[jax.Array, ...]]) -> dict[int, jax.Array]:
    """Stacks arrays that may differ in their length: the rows of replays that have grown to different sizes."""
    return _pad_and_stack(columns) if columns else {}


@jax.jit
def _pad_and_stack(columns: dict[int, tuple[jax.Array, ...]]) -> dict[int, jax.Array]:
    def stack(arrays: tuple[jax.Array, ...]) -> jax.Array:
        length = max(len(array) for array in arrays)
        pads = [[(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)] for array in arrays]
        return jnp.stack([jnp.pad(array, pad) for array, pad in zip(arrays, pads, strict=True)])

    return {index: stack(arrays) for index, arrays in columns.items()}


@jax.jit
def _stack(agents: list[Agent]) -> Agent:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *agents)


@jax.jit
def _take(agents: Agent, run: jax.Array) -> Agent:
    return jax.tree.map(lambda x: x[run], agents)


class _FetchedTable:
    """The metrics of all runs, fetched from the devices once."""

    def __init__(self, table: MetricsTable) -> None:
        self._table = table

    @functools.cached_property
    def values(self) -> np.ndarray:
        """float32 [runs, capacity, metrics]; waits until the devices have computed them."""
        return np.asarray(jax.device_get(self._table.values))

    def of_run(self, run: int) -> MetricsTable:
        return dataclasses.replace(self._table, values=self.values[run])


@dataclasses.dataclass(frozen=True)
class _RowsOfRun:
    table: _FetchedTable
    run: int

    def rows(self, num_updates: int) -> list[dict[str, float]]:
        return self.table.of_run(self.run).rows(num_updates)


def _shapes(feed: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(feed)]
