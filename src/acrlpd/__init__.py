"""Reinforcement-learning fine-tuning of pi0-family robot policies on action chunks."""

__version__ = "0.1.0"
