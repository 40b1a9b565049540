"""How an agent's arrays are named in a step directory (`runs.checkpoint_layout`), and how Orbax reads and writes it.

No array is stored twice: what is in params/ is not in train_state/.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from orbax.checkpoint import checkpoint_managers as policies

# Private, because Orbax has no public name for the order in which arrays are copied to the host.
from orbax.checkpoint._src.serialization import types as serialization

from acrlpd.agents import Agent
from acrlpd.config import CheckpointConfig
from acrlpd.runs.checkpoint_layout import ASSETS, PARAMS, RUN, RUN_FILE, TRAIN_STATE

SCORE = "score"
# So many GB of arrays may be on their way between devices and disk at the same time. Without this bound, the restore
# of a full-size state ran out of host memory.
_CONCURRENT_GB = 16
# A save copies so many GB to the host at once, for params/ and for train_state/ each. The first save allocates this
# memory, which is slower than the disk in a virtual machine, and later saves use it again.
_TRANSFER_GB = 8
# Large arrays are stored in pieces and in files of this size, so that all processors read and write them.
_PIECE_BYTES = 256 * 2**20
# Devices that have the same array each write a part of it. A part has at least this size, because each cut of an
# array has to be compiled.
_PART_BYTES = 2**16


def agent_items(agent: Agent, *, average: bool) -> dict[str, Any]:
    """The arrays of an agent (or their shapes) as the items params/ and train_state/: nested dicts by name.

    With `average`, params/ holds the moving average of the policy.
    """
    return traverse_util.unflatten_dict(_stored_leaves(agent, average))


def agent_from_items(template: Agent, items: Mapping[str, Any], *, average: bool) -> Agent:
    """The agent with the structure of `template` and the arrays of a checkpoint."""
    arrays = traverse_util.flatten_dict(items)
    leaves = [arrays[name] for name in _stored_leaves(template, average)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _stored_leaves(agent: Agent, average: bool) -> dict[tuple[str, ...], Any]:
    """Every leaf of an agent by its item and its names within the item, in the order of the agent's leaves.

    Everything but the policy lies in train_state/ under the names of the agent's fields, so a new field of the
    agent is stored without a change here.
    """
    policy_fields = ("ema_params" if average else "policy_params", "frozen_params")
    stored: dict[tuple[str, ...], Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(agent)[0]:
        name = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if name[0] in policy_fields:
            stored[PARAMS, "params", *name[1:]] = leaf  # openpi's tree, in which each array is called "value"
        else:
            stored[TRAIN_STATE, *(name[:-1] if name[-1] == "value" else name)] = leaf
    return stored


def create_manager(directory: pathlib.Path, config: CheckpointConfig, num_failures: int = 0) -> ocp.CheckpointManager:
    """The Orbax manager of a run's directory.

    When a save fails, the processes may have waited for each other a different number of times. The barriers of a
    new manager are named after the number of failures, so that all processes meet at the same barriers again.
    """
    keep: list[Any] = [policies.LatestN(config.max_to_keep)]
    if config.keep_period is not None:
        keep.append(policies.EveryNSteps(config.keep_period))
    if config.keep_best:
        keep.append(policies.BestN(get_metric_fn=lambda m: m[SCORE], n=1, keep_checkpoints_without_metrics=False))
    several = jax.process_count() > 1
    options = ocp.CheckpointManagerOptions(
        create=False,
        cleanup_tmp_directories=True,
        save_root_metadata=False,
        # Orbax writes metrics only when it has a function to rank by.
        best_fn=lambda metrics: metrics[SCORE],
        preservation_policy=policies.AnyPreservationPolicy(keep),
        # The writer has a thread of its own, which also copies the arrays to the host.
        enable_async_checkpointing=False,
        # Named processes wait for each other through the coordinator. Without names they would use a collective on
        # the devices, which must not get between the collectives of the train step.
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())) if several else None,
            barrier_sync_key_prefix=f"acrlpd{num_failures}" if several else None,
        ),
    )
    handlers = {
        PARAMS: array_handler(),
        TRAIN_STATE: array_handler(),
        RUN: ocp.JsonCheckpointHandler(filename=RUN_FILE),
        ASSETS: _AssetsHandler(),
    }
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


class _CopiedInTurn(serialization.DefaultSerializationStatusCallback):
    """Makes Orbax keep to `_TRANSFER_GB`. By default it copies all arrays before it writes any of them."""

    def key_priority(self, _: Any) -> serialization.TransferPriority:
        return serialization.TransferPriority.ASYNCHRONOUS_PRIORITIZED


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Reads and writes a tree of arrays as Zarr 2 in OCDBT, which openpi's Orbax reads.

    Arrays are not compressed: weights shrink by a few per cent only, for half of the processor time of a save.
    """
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_PART_BYTES, callback=_CopiedInTurn())
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_ocdbt=True,
        use_zarr3=False,
        use_compression=False,
        save_concurrent_gb=_CONCURRENT_GB,
        save_device_host_concurrent_gb=_TRANSFER_GB,
        restore_concurrent_gb=_CONCURRENT_GB,
    )


def save_arrays(tree: Any) -> ocp.args.PyTreeSave:
    pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_PIECE_BYTES), tree)
    return ocp.args.PyTreeSave(tree, save_args=pieces, ocdbt_target_data_file_size=_PIECE_BYTES)


class _AssetsHandler(ocp.CheckpointHandler):
    """Writes small files into an item of a step directory."""

    def save(self, directory: epath.Path, args: "SaveAssets") -> None:
        if jax.process_index() != 0:
            return
        for name, content in args.files.items():
            path = pathlib.Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def restore(self, directory: epath.Path, args: ocp.args.CheckpointArgs) -> None:
        raise NotImplementedError(f"{directory} holds plain files: read them without Orbax")


@ocp.args.register_with_handler(_AssetsHandler, for_save=True, for_restore=True)  # Orbax wants both.
@dataclasses.dataclass
class SaveAssets(ocp.args.CheckpointArgs):
    """The files of assets/: relative path -> content."""

    files: Mapping[str, bytes]
