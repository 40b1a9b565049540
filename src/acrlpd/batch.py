"""The contract between the data layer, which makes batches, and the agent, which learns from them."""

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from acrlpd.models.observation import Array, Observation


@flax.struct.dataclass
class Returns:
    """How the episodes of B windows go on, for improvements that label prompts.

    Each step until the step that succeeds costs 1 / L, where L is the number of steps of the task's longest episode.
    The return of a failure is -1, and no return is lower. Steps after a failure go on to cost, so that all windows of a
    failure are judged alike, those at its end included.
    """

    return_to_go: Array  # float32 [B] from step t on, in [-1, 0]
    rewards: Array  # float32 [B] the cost of the H steps, as a negative number
    continues: Array  # float32 [B] 1 if the episode goes on after the H steps
    fails: Array  # float32 [B] 1 if the episode ends within the H steps without success
    counts: Array  # float32 [B] 0 for a window that begins after the success
    human: Array  # float32 [B] 1 if a human, who took over from the policy, chose all actions of the window


@flax.struct.dataclass
class Batch:
    """A batch of action-chunk transitions: B windows that start at a random step t of an episode.

    T is the policy's action_horizon, H the steps of a target (`horizon_length`): those of the critic's chunk, or more
    with n-step returns.
    """

    observations: Observation  # at t
    next_observations: Observation  # at t + H, or at the last step of an episode that ends earlier
    actions: Array  # float32 [B, T, a] normalised and padded as the policy wants them
    valid: Array  # float32 [B, T] 1 while the step lies inside the episode
    rewards: Array  # float32 [B, H] raw, per step; 0 where the step is not valid
    masks: Array  # float32 [B, H] 1 while bootstrapping is allowed; 0 from a true terminal on
    terminals: Array  # float32 [B, H] 1 at a true terminal step, 0 where a time limit cuts
    next_terminal: Array  # float32 [B] 1 if a true terminal lies within the H steps
    sequence_mask: Array  # float32 [B] 1 if the critic may learn from this window
    leads_to_success: Array  # float32 [B] 1 if the episode succeeds at step t or later
    # float32 [B] how probable this window is in the data, divided by how probable it was in the draw. All 1, unless
    # `qchunking.success_ratio` draws windows that lead to a success more often.
    importance: Array
    task_id: Array  # int32 [B] equal for windows with the same prompt
    episode_id: Array  # int32 [B]
    step_id: Array  # int32 [B]
    # float32 [B, n] the noise that the played chunk at t was made of; None unless critics judge noise.
    noise: Array | None = None
    returns: Returns | None = None  # None: the improvement labels no prompts

    def __getitem__(self, name: str) -> Any:
        """A field by its name: batch["actions"] is batch.actions."""
        names = [field.name for field in dataclasses.fields(self)]
        if name not in names:
            raise KeyError(f"a batch has {', '.join(names)}; found {name!r}")
        return getattr(self, name)

    @property
    def critic_weight(self) -> Array:
        """How much each window counts for the critics [B], so that they learn as if windows were drawn evenly."""
        return self.sequence_mask * self.importance

    def with_transitions_of(self, other: "Batch") -> "Batch":
        """This batch with what is seen and done in another batch of the same windows; rewards and ends stay."""
        return dataclasses.replace(
            self,
            observations=other.observations,
            next_observations=other.next_observations,
            actions=other.actions,
            valid=other.valid,
        )


class Feed(Protocol):
    """The batches of the updates that one call of the train step makes, as a pytree that lies on the devices."""

    @property
    def capacity(self) -> int:
        """The largest number of updates of a call; the program is compiled for this number."""

    def batch(self, index: jax.Array) -> Batch:
        """The batch of the update with this index in the call; computed on the devices."""


@flax.struct.dataclass
class StackedBatches:
    """A feed of whole batches that the host has made."""

    batches: Batch  # with a leading axis [capacity]; a capacity of 1 needs no such axis
    capacity: int = flax.struct.field(pytree_node=False, default=1)

    def batch(self, index: jax.Array) -> Batch:
        return self.batches if self.capacity == 1 else jax.tree.map(lambda x: x[index], self.batches)


@jax.jit
def first_batch(feed: Feed) -> Batch:
    """The batch of the first update that a feed serves."""
    return feed.batch(jnp.zeros((), jnp.int32))
