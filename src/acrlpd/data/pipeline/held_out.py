"""Windows of the held-out episodes: what a policy would have seen there, what was done, and what came of it."""

import dataclasses
import logging

import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.batches import BatchBuilder, make_windows
from acrlpd.data.pipeline.config_episodes import read_windows
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.data.pipeline.rewards import StepRewards
from acrlpd.data.pipeline.transforms import compose
from acrlpd.models.observation import Observation

logger = logging.getLogger(__name__)

# Windows of one validation. Their images stay in the memory of the host: 115 MB for three cameras of 224 x 224.
MAX_WINDOWS = 256
# Windows of the training data from which the mean action is computed.
_MEAN_WINDOWS = 2_000


@dataclasses.dataclass(frozen=True)
class HeldOutWindows:
    """n windows, evenly spread over the steps of all held-out episodes, on the host."""

    observations: Observation  # [n, ...] as in a batch
    actions: np.ndarray  # float32 [n, T, a] normalised and padded, as in a batch
    valid: np.ndarray  # bool [n, T] whether the step lies inside the episode
    logged: np.ndarray  # float32 [n, T, d] the actions in the robot's units
    mean_action: np.ndarray  # float32 [n, T, d] the mean chunk of the training data, in the robot's units
    imitated: np.ndarray  # bool [n] whether the policy is meant to do what was done here
    returns: np.ndarray  # float64 [n] discounted rewards up to the next terminal; NaN if no terminal was recorded
    leads_to_success: np.ndarray  # bool [n] whether the episode succeeds at this step or later
    episode_succeeds: np.ndarray  # bool [n]
    episode_id: np.ndarray  # int [n] the dataset's own number
    step_id: np.ndarray  # int [n]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def num_episodes(self) -> int:
        return len(np.unique(self.episode_id))


def read_held_out_windows(dataset: Dataset, rl_config: RLTrainConfig) -> HeldOutWindows | None:
    """The windows of the held-out episodes of a dataset; None if nothing is held out."""
    held_out = dataset.held_out
    if held_out is None:
        _report_nothing_held_out(len(dataset.source), rl_config.data.validation_share)
        return None
    builder, rewards, offsets = BatchBuilder(held_out, rl_config), held_out.rewards, held_out.table.offsets
    rows = _spread_rows(rewards)
    episodes = held_out.table.episodes_of(rows)
    windows = make_windows(rows, offsets[episodes + 1] - 1, rewards, *builder.horizons)
    action_rows = np.asarray(windows.action_rows)
    observations, actions = builder.read(rows, action_rows, builder.read_frames(episodes, rows))
    to_robot = compose(dataset.transforms.data_outputs)
    plain = read_windows(held_out.table, rl_config, rows)  # before normalisation
    mean = np.broadcast_to(_mean_chunk(dataset, rl_config), plain["actions"].shape)
    leads_to_success = rewards.leads_to_success[rows]
    found = HeldOutWindows(
        observations=observations,
        actions=actions,
        valid=np.asarray(windows.fields["valid"]) > 0,
        logged=to_robot(plain)["actions"],
        mean_action=to_robot({**plain, "actions": mean})["actions"],
        imitated=leads_to_success if _imitates_successes(rl_config) else np.ones(len(rows), bool),
        returns=returns_to_terminal(rewards, offsets, rl_config.acrlpd.discount)[rows],
        leads_to_success=leads_to_success,
        episode_succeeds=rewards.success[episodes],
        episode_id=np.array(held_out.source.indices)[episodes],
        step_id=rows - offsets[episodes],
    )
    logger.info(
        "validation: %d windows of %d held-out episodes (%s); %d episodes to train on",
        len(found),
        len(held_out.source),
        rewards.outcomes,
        len(dataset.source),
    )
    if not found.imitated.any():
        logger.warning(
            "no held-out episode is a success, and the policy is to act as in successes alone: the actions of the "
            "policy cannot be validated. Raise data.validation_share"
        )
    return found


def _report_nothing_held_out(num_episodes: int, share: float) -> None:
    """Says why a run that asks for held-out episodes has none."""
    if share > 0 and num_episodes > 1:
        logger.info(
            "validation: none, because data.validation_share=%g holds no episode out of %d; %.2g holds one out",
            share,
            num_episodes,
            1 / num_episodes,
        )


def returns_to_terminal(rewards: StepRewards, offsets: np.ndarray, discount: float) -> np.ndarray:
    """float64 [N]: the discounted rewards from each step to the next terminal, beyond which nothing can be gained.

    NaN where the recording stops without a terminal: nobody knows what would have followed.
    """
    returns, following = np.full(int(offsets[-1]), np.nan), np.nan
    last_rows = set((offsets[1:] - 1).tolist())
    for row in reversed(range(len(returns))):
        if row in last_rows:
            following = np.nan
        following = rewards.rewards[row] + (0.0 if rewards.terminals[row] else discount * following)
        returns[row] = following
    return returns


def _spread_rows(rewards: StepRewards) -> np.ndarray:
    """Rows at even distances, without steps that were recorded after the end of their episode."""
    rows = np.flatnonzero(~rewards.after_terminal)
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_WINDOWS)).round().astype(np.int64)]


def _mean_chunk(dataset: Dataset, rl_config: RLTrainConfig) -> np.ndarray:
    """The mean of the actions of the training data [T, d], as a policy that sees nothing would predict it."""
    num_rows = dataset.table.num_rows
    rows = np.linspace(0, num_rows - 1, min(num_rows, _MEAN_WINDOWS)).round().astype(np.int64)
    # Sums of float32 are rounded, and a dim that never moves would seem to move.
    return read_windows(dataset.table, rl_config, rows)["actions"].mean(axis=0, dtype=np.float64).astype(np.float32)


def _imitates_successes(rl_config: RLTrainConfig) -> bool:
    """Whether the policy is meant to act as in successes alone: it saw nothing else, or acts with a label for good."""
    clones_successes = rl_config.acrlpd.policy_data == "success" or rl_config.data.episode_filter == "success"
    return clones_successes or rl_config.labels_prompts
