"""openpi's learning-rate schedules and AdamW, built once per config.

Everything here is cached: the same config gives the very same functions, so that two agents made from
one config have equal pytrees and share one compiled step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from acrlpd.agents.optimizer_configs import AdamW, ConstantSchedule, CosineDecaySchedule, LRSchedule

Schedule = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A gradient transformation and the schedule inside it, which metrics report. Static in a pytree."""

    tx: optax.GradientTransformationExtraArgs
    schedule: Schedule

    def learning_rate(self, opt_state: optax.OptState) -> jax.Array:
        """The rate of the next update; the schedule's index is the optimizer's own update count."""
        adam_state = opt_state[1][0]  # chain(clip, chain(Adam, decay, schedule)), openpi's layout
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
    """AdamW after clipping by global norm, as openpi has it: the decay is on every parameter.

    Its `update` takes one more argument, `enabled`: where it is False the updates are zero and the state
    comes back as it was. Choosing between the old and the new state afterwards would say the same, but
    keep both in memory.
    """
    schedule = create_lr_schedule(lr_schedule)
    tx = optax.chain(
        optax.clip_by_global_norm(config.clip_gradient_norm),
        optax.chain(
            _scale_by_adam(config),
            optax.add_decayed_weights(config.weight_decay),
            _scale_by_schedule(schedule),
        ),
    )
    return Optimizer(tx=tx, schedule=schedule)


def _scale_by_adam(config: AdamW) -> optax.GradientTransformationExtraArgs:
    """optax's Adam, with optax's state, that can be told to stand still."""

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None, *, enabled: jax.Array | bool = True, **_: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        def average(decay: float, old: Any, new: Any) -> Any:
            keep, add = jnp.where(enabled, decay, 1.0), jnp.where(enabled, 1 - decay, 0.0)
            return jax.tree.map(lambda o, n: keep * o + add * jnp.where(enabled, n, 0.0), old, new)

        mu = average(config.b1, state.mu, grads)
        nu = average(config.b2, state.nu, jax.tree.map(jnp.square, grads))
        count = optax.safe_increment(state.count)
        first, second = 1 - config.b1**count, 1 - config.b2**count
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + config.eps), mu, nu)
        return updates, optax.ScaleByAdamState(jnp.where(enabled, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_schedule(schedule: Schedule) -> optax.GradientTransformationExtraArgs:
    """Minus the learning rate, or 0."""

    def init(params: Any) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(
        updates: Any,
        state: optax.ScaleByScheduleState,
        params: Any = None,
        *,
        enabled: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, optax.ScaleByScheduleState]:
        step_size = jnp.where(enabled, -schedule(state.count), 0.0)
        count = jnp.where(enabled, optax.safe_increment(state.count), state.count)
        return jax.tree.map(lambda u: step_size * u, updates), optax.ScaleByScheduleState(count)

    return optax.GradientTransformationExtraArgs(init, update)
