"""Scripted experts of simulated environments, and the datasets of demonstrations that they make."""

from acrlpd.experts.expert import Expert, register_expert
