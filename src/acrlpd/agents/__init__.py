"""The algorithm: critics, losses, best-of-N, temperature, and the agent with its one train step.

Knows nothing of files, devices, loggers or environments.
"""

from acrlpd.agents.agent import Agent, Call, MetricsTable, train_step, train_steps
from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.critics.base import CriticEnsemble

__all__ = ["Agent", "Algorithm", "Call", "CriticEnsemble", "MetricsTable", "train_step", "train_steps"]
