"""The algorithm: critics, losses, best-of-N, temperature, and the agent with its one train step.

Knows nothing of files, devices, loggers or environments.
"""

from acrlpd.agents.acrlpd_pi0_agent import ACRLPDPi0Agent, train_step, train_steps
from acrlpd.agents.best_of_n import BestOfN
from acrlpd.agents.create import create_acrlpd_pi0_agent, create_acrlpd_pi0_agent_from_rl_config, follow_config
from acrlpd.agents.critic_networks import CriticEnsemble, CriticNetworks, create_critic_networks
from acrlpd.agents.loss_functions import Algorithm
from acrlpd.agents.optimizers import Optimizer, create_lr_schedule, create_optimizer
from acrlpd.agents.temperature import TemperatureModule, estimate_entropy
from acrlpd.agents.train_state import TrainState

__all__ = [
    "ACRLPDPi0Agent",
    "Algorithm",
    "BestOfN",
    "CriticEnsemble",
    "CriticNetworks",
    "Optimizer",
    "TemperatureModule",
    "TrainState",
    "create_acrlpd_pi0_agent",
    "create_acrlpd_pi0_agent_from_rl_config",
    "create_critic_networks",
    "create_lr_schedule",
    "create_optimizer",
    "estimate_entropy",
    "follow_config",
    "train_step",
    "train_steps",
]
