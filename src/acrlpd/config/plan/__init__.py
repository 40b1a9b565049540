"""The plan: memory, arithmetic and step time of a config, before an update is compiled."""

from acrlpd.config.plan.chips import CHIPS, MEMORY_FRACTION, Chip, find_chip
from acrlpd.config.plan.flops import StepFlops, step_flops
from acrlpd.config.plan.memory import Memory, estimate_memory
from acrlpd.config.plan.plan import Plan, make_plan, predict_step_seconds

__all__ = [
    "CHIPS",
    "MEMORY_FRACTION",
    "Chip",
    "Memory",
    "Plan",
    "StepFlops",
    "estimate_memory",
    "find_chip",
    "make_plan",
    "predict_step_seconds",
    "step_flops",
]
