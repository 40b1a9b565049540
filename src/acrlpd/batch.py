"""The contract between the data layer, which makes batches, and the agent, which learns from them."""

import flax.struct

from acrlpd.models.observation import Array, Observation


@flax.struct.dataclass
class Batch:
    """A batch of action-chunk transitions: B windows that start at a random step t of an episode.

    T is the policy's action_horizon, H <= T the critic's chunk length (`horizon_length`).
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
    episode_id: Array  # int32 [B]
    step_id: Array  # int32 [B]
