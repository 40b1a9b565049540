"""openpi's learning-rate schedules and AdamW, built once per config.

Everything here is cached: the same config gives the very same functions, so that two agents made from
one config have equal pytrees and share one compiled step.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from acrlpd.config import AdamW, ConstantSchedule, CosineDecaySchedule, LRSchedule

Schedule = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A gradient transformation and the schedule inside it, which metrics report. Static in a pytree."""

    tx: optax.GradientTransformation
    schedule: Schedule

    def learning_rate(self, opt_state: optax.OptState) -> jax.Array:
        """The rate of the next update; the schedule's index is the optimizer's own update count."""
        adam_state = opt_state[1][0]  # chain(clip, adamw); adamw is itself a chain that starts with Adam
        return jnp.asarray(self.schedule(adam_state.count), jnp.float32)


@functools.cache
def create_lr_schedule(config: LRSchedule) -> Schedule:
    """Maps the update count to a learning rate."""
    if isinstance(config, ConstantSchedule):
        return optax.constant_schedule(config.peak_lr)
    if isinstance(config, CosineDecaySchedule):
        return optax.warmup_cosine_decay_schedule(
            init_value=config.peak_lr / (config.warmup_steps + 1),
            peak_value=config.peak_lr,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            end_value=config.decay_lr,
        )
    warmup = optax.linear_schedule(config.peak_lr / (config.warmup_steps + 1), config.peak_lr, config.warmup_steps)

    def rsqrt(count: jax.Array) -> jax.Array:
        return config.peak_lr / jnp.sqrt((config.timescale + count) / config.timescale)

    return optax.join_schedules([warmup, rsqrt], [config.warmup_steps])


@functools.cache
def create_optimizer(config: AdamW, lr_schedule: LRSchedule) -> Optimizer:
    """AdamW after clipping by global norm, as openpi has it: the decay is on every parameter."""
    schedule = create_lr_schedule(lr_schedule)
    tx = optax.chain(
        optax.clip_by_global_norm(config.clip_gradient_norm),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay),
    )
    return Optimizer(tx=tx, schedule=schedule)
