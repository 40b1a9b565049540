"""Optimizers and learning-rate schedules as plain data, in openpi's words.

The step index of a schedule is the optimizer's own update count, which starts at 0.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CosineDecaySchedule:
    """Linear warm-up to `peak_lr`, then half a cosine down to `decay_lr`, constant after that."""

    # Updates until the peak is reached. More: gentler start, needed when Adam's moments are cold.
    warmup_steps: int = 1_000
    # Largest learning rate.
    peak_lr: float = 2.5e-5
    # Update at which `decay_lr` is reached; includes the warm-up.
    decay_steps: int = 30_000
    # Learning rate at the end. Equal to `peak_lr`: constant after the warm-up.
    decay_lr: float = 2.5e-6


@dataclasses.dataclass(frozen=True)
class RsqrtDecaySchedule:
    """Linear warm-up to `peak_lr`, then inverse square root decay without an end."""

    # Updates until the peak is reached.
    warmup_steps: int = 1_000
    # Largest learning rate.
    peak_lr: float = 5e-5
    # The rate has fallen to peak / sqrt(2) this many updates after the warm-up. Larger: slower decay.
    timescale: float = 10_000.0


@dataclasses.dataclass(frozen=True)
class ConstantSchedule:
    """The same learning rate at every update."""

    # The learning rate; called as in the other schedules so that one override fits all.
    peak_lr: float = 3e-4


LRSchedule = CosineDecaySchedule | RsqrtDecaySchedule | ConstantSchedule


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW after clipping by global norm; moments are float32."""

    # Decay of the first moment. Higher: smoother, slower to turn.
    b1: float = 0.9
    # Decay of the second moment. openpi uses 0.95; the usual 0.999 reacts slower to gradient scale.
    b2: float = 0.95
    # Added to the root of the second moment.
    eps: float = 1e-8
    # Pull of every weight towards zero, times the learning rate.
    weight_decay: float = 1e-10
    # Gradients with a larger global norm are scaled down to it. Lower: more robust, slower.
    clip_gradient_norm: float = 1.0
