"""The learner: the agents of one or several runs on the devices, and the compiled train step that updates them.

Runs whose configs differ only in the seed compute the same program with other numbers. One call of the program updates
the agents of all runs: a small network leaves a part of each device idle, which the networks of other runs can use.

Runs whose configs differ only in their rewards may have the same policy as well, because rewards do not reach a policy
that only clones. Such runs have a leader, whose policy is computed for all of them, and each run has its own critics.
"""

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.agents import Agent, Call, MetricsTable
from acrlpd.training.sharding import FSDPSharding, compile_train_steps


class Learner:
    """Holds the agents of the runs, which are numbered from 0, and updates them together.

    All runs need configs of one shape: the same networks, batch size and optimizers.
    """

    def __init__(self, sharding: FSDPSharding) -> None:
        self.sharding = sharding
        self._leaders: tuple[int, ...] | None = None
        self.agents: list[Agent] = []
        # The compiled programs, by whether the policy is updated. They are empty before the first call.
        self.programs: dict[bool, jax.stages.Compiled] = {}
        self.feed_shapes: list[tuple[int, ...]] = []  # those that the programs are compiled for

    def add(self, agent: Agent) -> None:
        """Adds a run."""
        self.agents.append(agent)

    def share_policies(self, leaders: Sequence[int]) -> None:
        """Lets runs share a policy: `leaders` has the leader of each run, itself or an earlier run.

        A run keeps its own policy if that of its leader is another one at the same step, as after a change of settings.
        """
        agents = self.agents
        self._leaders = tuple(
            leader if leader == run or _have_one_policy(agents[leader], agents[run]) else run
            for run, leader in enumerate(leaders)
        )

    def leader(self, run: int) -> int:
        """The run that has the same policy, at the same step, as this run; the run itself if it has no other leader."""
        return run if self._leaders is None else self._leaders[run]

    def is_compiled_for(self, calls: Sequence[Call]) -> bool:
        """Whether there are programs for feeds of these shapes; the shapes change when a replay outgrows its place."""
        return self.feed_shapes == _shapes(calls)

    def compile(self, calls: Sequence[Call], kinds: Collection[bool]) -> None:
        """Compiles the programs for calls like these, one of each run; `kinds` says whether they update the policy."""
        self.programs = {
            kind: compile_train_steps(
                self.agents, list(calls), self.sharding, update_policy=kind, leaders=self._leaders
            )
            for kind in sorted(kinds)
        }
        self.feed_shapes = _shapes(calls)

    def update(
        self, calls: Sequence[Call], active: Collection[int], num_updates: int, *, update_policy: bool
    ) -> MetricsTable:
        """Starts `num_updates` updates of each active run in one call, which has a place for each run.

        The agents of the other runs wait. Their places update copies that are dropped: so an active run computes the
        same program, and the same bits, whichever runs wait. Active runs with one leader are at the same step. If the
        leader waits, its place computes their policy.
        """
        agents = [agent if run in active else _copy(agent) for run, agent in enumerate(self.agents)]
        for run in active:
            if (leader := self.leader(run)) not in active:
                agents[leader] = agents[leader].with_policy_of(_copy(self.agents[run]))
        updated, table = self.programs[update_policy](agents, list(calls), np.int32(num_updates))
        self.agents = [updated[run] if run in active else agent for run, agent in enumerate(self.agents)]
        return table


@jax.jit
def _copy(agent: Agent) -> Agent:
    return jax.tree.map(jnp.copy, agent)


def _have_one_policy(one: Agent, other: Agent) -> bool:
    """Whether two policies are equal. Policies at different steps cannot be compared, and count as equal."""
    if int(one.step) != int(other.step):
        return True
    pairs = zip(jax.tree.leaves(one.policy_params), jax.tree.leaves(other.policy_params), strict=True)
    return all(bool(jnp.array_equal(a, b)) for a, b in pairs)


def _shapes(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves([call.feed for call in calls])]
