"""openpi's view of a training run, for checkpoints that openpi reads."""

from typing import Any

import flax.struct
import jax
import optax
from flax import nnx


class TrainState(flax.struct.PyTreeNode):
    """openpi's fields, in openpi's order; `rl` holds what openpi has no word for."""

    step: jax.Array
    params: nnx.State  # the whole policy, openpi's names: float32, frozen leaves bfloat16
    opt_state: optax.OptState | None
    ema_params: nnx.State | None = None
    rl: Any = None  # critics, temperature, their optimizer states and counters
    model_def: nnx.GraphDef | None = flax.struct.field(pytree_node=False, default=None)
    ema_decay: float | None = flax.struct.field(pytree_node=False, default=None)
