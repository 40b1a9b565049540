"""openpi's view of a policy, for checkpoints that openpi reads."""

import flax.struct
import jax
from flax import nnx


class TrainState(flax.struct.PyTreeNode):
    """The fields of openpi's TrainState that openpi needs to serve a policy."""

    step: jax.Array
    params: nnx.State  # the whole policy under openpi's names: float32, frozen leaves bfloat16
    model_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
