"""What an optimizer is: a direction from gradients, between clipping by global norm and the learning rate."""

import abc
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from acrlpd.agents.schedules.base import LRSchedule, Schedule
from acrlpd.choice import Choice


class OptimizerConfig(Choice, abc.ABC):
    """An optimizer as plain data."""

    package = "acrlpd.agents.optimizers"

    # Gradients with a larger global norm are scaled down to this norm.
    clip_gradient_norm: float
    # Whether the transformations themselves take the argument `enabled` of `create_optimizer`.
    stands_still: ClassVar[bool] = False

    @abc.abstractmethod
    def transformations(self) -> Iterable[optax.GradientTransformation]:
        """From clipped gradients to the direction of the update, which the learning rate then scales."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A gradient transformation and the schedule inside it, which metrics report. Static in a pytree."""

    tx: optax.GradientTransformationExtraArgs
    schedule: Schedule

    def step(
        self, grads: Any, opt_state: optax.OptState, params: Any, *, enabled: jax.Array
    ) -> tuple[Any, optax.OptState]:
        """Parameters and state after one update; both as they were where `enabled` is False."""
        updates, opt_state = self.tx.update(grads, opt_state, params, enabled=enabled)
        return optax.apply_updates(params, updates), opt_state

    def learning_rate(self, opt_state: optax.OptState) -> jax.Array:
        """The rate of the next update."""
        return jnp.asarray(self.schedule(opt_state[1][-1].count), jnp.float32)


@functools.cache
def create_optimizer(config: OptimizerConfig, lr_schedule: LRSchedule) -> Optimizer:
    """The optimizer of a config, in openpi's layout: chain(clip, chain(direction ..., learning rate)).

    Its `update` takes one more argument, `enabled`. Where `enabled` is False the updates are zero and the state comes
    back as it was. Choosing between the old and the new state costs memory for both, so an optimizer that can stand
    still by itself says so.

    Cached: the same config gives the very same functions, so that two agents of one config share one compiled step.
    """
    schedule = lr_schedule.create()
    steps = config.transformations()
    steps = steps if config.stands_still else map(_standing_still, steps)
    scale = _standing_still(optax.scale_by_schedule(lambda count: -schedule(count)))
    tx = optax.chain(optax.clip_by_global_norm(config.clip_gradient_norm), optax.chain(*steps, scale))
    return Optimizer(tx=tx, schedule=schedule)


def _standing_still(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Any transformation of optax, with zero updates and its old state where `enabled` is False."""

    def update(
        grads: Any, state: Any, params: Any = None, *, enabled: jax.Array | bool = True, **_: Any
    ) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda g: jnp.where(enabled, g, 0.0), grads)
        updates, new = inner.update(grads, state, params)
        return updates, jax.tree.map(lambda n, o: jnp.where(enabled, n, o), new, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)
