"""The algorithm: critics, losses, best-of-N, temperature, and the agent with its one train step.

Knows nothing of files, devices, loggers or environments.
"""

from acrlpd.agents.agent import Agent, train_step, train_steps
from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.best_of_n import BestOfN
from acrlpd.agents.create import assemble_agent
from acrlpd.agents.critics.base import CriticEnsemble
from acrlpd.agents.networks import CriticNetworks, create_critic_networks
from acrlpd.agents.optimizers.base import Optimizer, create_optimizer
from acrlpd.agents.temperature import TemperatureModule, estimate_entropy
from acrlpd.agents.train_state import TrainState

__all__ = [
    "Agent",
    "Algorithm",
    "BestOfN",
    "CriticEnsemble",
    "CriticNetworks",
    "Optimizer",
    "TemperatureModule",
    "TrainState",
    "assemble_agent",
    "create_critic_networks",
    "create_optimizer",
    "estimate_entropy",
    "train_step",
    "train_steps",
]
