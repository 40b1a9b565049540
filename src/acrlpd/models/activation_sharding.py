"""Keeps activations split by sample when a model runs on a mesh.

Sharded weights and a sharded batch leave the compiler a choice: gather a layer's weights, or gather the
batch and compute with parts of the weights. For large batches the second costs far more, so layers say
that their activations stay where their samples are. Without a mesh around (`jax.set_mesh`) nothing is said.
"""

import jax
from jax.sharding import PartitionSpec


def split_by_sample(x: jax.Array) -> jax.Array:
    """x [b, ...] with its first axis over all devices of the mesh that is in use."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(mesh.axis_names))


def weights_are_split() -> bool:
    """Whether devices of the mesh that is in use share one copy of the weights: openpi's axis `fsdp`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape.get("fsdp", 1) > 1
