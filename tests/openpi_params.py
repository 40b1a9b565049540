"""Reads the parameters of a checkpoint with nothing but Orbax, as openpi does."""

import pathlib
from typing import Any

import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict


def read_openpi_params(directory: pathlib.Path) -> dict[str, Any]:
    """The nested parameters in `directory`/params, without the key "value" that openpi adds to every leaf."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        flat = flatten_dict(checkpointer.restore(directory.absolute() / "params")["params"])
    assert all(path[-1] == "value" for path in flat)
    return unflatten_dict({path[:-1]: leaf for path, leaf in flat.items()})
