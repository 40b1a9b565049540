"""How much a served policy may cost: denoising steps, candidates and critics, by robot and level."""

from typing import Literal

from acrlpd.config import RLTrainConfig
from acrlpd.models.families.base import PolicyConfig
from acrlpd.robots.base import ServingLevel

Level = Literal["fast", "standard", "accurate"]
FAST_STEPS, FAST_CRITICS = 10, 3
ACCURATE_STEPS = 50


def describe_steps(model: PolicyConfig, *num_steps: int) -> str:
    """How a policy makes a chunk, in words; several numbers of steps are alternatives."""
    return "token by token" if model.samples_tokens else f"{' or '.join(map(str, num_steps))} denoising steps"


def trained_level(rl_config: RLTrainConfig) -> ServingLevel:
    """What an action chunk cost when training judged the policy."""
    best_of_n = rl_config.evaluation.best_of_n or rl_config.acrlpd.num_action_samples
    return ServingLevel(rl_config.acrlpd.sampling_steps, best_of_n, rl_config.critic.num_critics)


def serving_level(rl_config: RLTrainConfig, level: Level) -> ServingLevel:
    """What a level costs for the robot of a config; a robot without a standard level is served as it was trained.

    "fast" has few steps and 3 critics, "accurate" has 50 steps and all critics. The number of candidates is the same
    at all levels.
    """
    trained = trained_level(rl_config)
    standard = rl_config.data.robot.standard_level or trained
    num_steps, num_critics = {
        "fast": (min(FAST_STEPS, standard.num_steps), FAST_CRITICS),
        "standard": (standard.num_steps, standard.num_critics),
        "accurate": (ACCURATE_STEPS, trained.num_critics),
    }[level]
    return ServingLevel(num_steps, standard.best_of_n, min(num_critics, trained.num_critics))
