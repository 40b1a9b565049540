"""How much a served policy may cost: denoising steps, candidates and critics, by robot and level."""

import dataclasses
from typing import Literal

from acrlpd.config import RLTrainConfig

Level = Literal["fast", "standard", "accurate"]
FAST_STEPS, FAST_CRITICS = 10, 3
ACCURATE_STEPS = 50


@dataclasses.dataclass(frozen=True)
class ServingLevel:
    """What one action chunk costs."""

    num_steps: int
    best_of_n: int
    num_critics: int


# The "standard" level of robots with real-time needs; any other robot is served as it was trained.
_STANDARD = {
    "droid": ServingLevel(num_steps=20, best_of_n=8, num_critics=5),
    "aloha": ServingLevel(num_steps=15, best_of_n=12, num_critics=4),
    "libero": ServingLevel(num_steps=10, best_of_n=16, num_critics=8),
}


def trained_level(rl_config: RLTrainConfig) -> ServingLevel:
    """As the policy was judged in training."""
    best_of_n = rl_config.evaluation.best_of_n or rl_config.acrlpd.num_action_samples
    return ServingLevel(rl_config.acrlpd.sampling_steps, best_of_n, rl_config.critic.num_critics)


def serving_level(rl_config: RLTrainConfig, level: Level) -> ServingLevel:
    """ "fast" has few steps and 3 critics, "accurate" 50 steps and all critics; N is the robot's at each."""
    trained = trained_level(rl_config)
    standard = _STANDARD.get(rl_config.data.robot, trained)
    if level == "fast":
        num_steps = min(FAST_STEPS, standard.num_steps)
        chosen = dataclasses.replace(standard, num_steps=num_steps, num_critics=FAST_CRITICS)
    elif level == "accurate":
        chosen = dataclasses.replace(standard, num_steps=ACCURATE_STEPS, num_critics=trained.num_critics)
    else:
        chosen = standard
    return dataclasses.replace(chosen, num_critics=min(chosen.num_critics, trained.num_critics))
