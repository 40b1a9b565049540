"""Whether the data has the successes and failures that the settings of a run need."""

import logging

from acrlpd.choice import kind_name
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.rewards import StepRewards
from acrlpd.data.sources.source import DatasetError

logger = logging.getLogger(__name__)


class OutcomeError(DatasetError):
    """Settings that need successes or failures which the data does not have."""


def needs_outcomes(rl_config: RLTrainConfig) -> bool:
    """Whether a config has settings that need successes or failures."""
    needs_success = rl_config.acrlpd.policy_data == "success" or rl_config.qchunking.success_ratio is not None
    return needs_success or rl_config.labels_prompts or rl_config.data.rewards.failure_reward is not None


def require_outcomes(rewards: StepRewards, rl_config: RLTrainConfig) -> None:
    """Refuses settings that need successes which the rewards do not have."""
    label = "Label episodes with `acrlpd data label`"
    if rl_config.acrlpd.policy_data == "success":
        found = f"acrlpd.policy_data success: the {len(rewards.success)} episodes of the data"
        if not rewards.success.any():
            raise OutcomeError(
                f"{found} have no success that the policy could be cloned from. {label}, or set acrlpd.policy_data all "
                "or advantage"
            )
        # An online phase may add failures to a dataset of successes.
        if rewards.leads_to_success.all() and not rl_config.training.online_steps:
            raise OutcomeError(
                f"{found} are all successes from beginning to end, so the setting changes nothing. Set "
                "acrlpd.policy_data all, or add episodes that failed"
            )
    if rl_config.qchunking.success_ratio is not None and not rewards.success.any():
        raise OutcomeError(
            f"qchunking.success_ratio {rl_config.qchunking.success_ratio}: none of the {len(rewards.success)} episodes "
            f"of the data is a success to draw windows from. {label}, or set qchunking.success_ratio null"
        )
    if rl_config.labels_prompts and (rewards.success.all() or not rewards.success.any()):
        kind = "successes" if rewards.success.any() else "failures"
        raise OutcomeError(
            f"improvement {kind_name(rl_config.improvement)} labels good and bad windows, and the "
            f"{len(rewards.success)} episodes of the data are all {kind}. {label}, or add episodes of the other kind"
        )


def require_and_report_outcomes(rewards: StepRewards, rl_config: RLTrainConfig) -> None:
    """As `require_outcomes`, with a warning about a reward that no failure gets."""
    require_outcomes(rewards, rl_config)
    if rl_config.data.rewards.failure_reward is not None and not rewards.failure.any():
        logger.warning(
            "data.rewards.failure_reward %g: no episode of the data is known to have failed (%s), so the reward is not "
            "used there. Label failures with `acrlpd data label`, or remove the setting",
            rl_config.data.rewards.failure_reward,
            rewards.outcomes,
        )
