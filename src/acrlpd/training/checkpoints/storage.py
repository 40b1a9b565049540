"""How Orbax is told to write and read: which checkpoints stay, how much moves at once, in pieces of what size."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint._src.metadata import array_metadata_store  # neither has a public name
from orbax.checkpoint._src.serialization import types as serialization

from acrlpd.config import CheckpointConfig
from acrlpd.training.checkpoints.items import ASSETS, PARAMS, RUN, RUN_FILE, TRAIN_STATE, AssetsHandler

SCORE = "score"
# Of arrays that are on their way between devices and disk at the same time: with all of them at once, the restore of
# a full-size state ran out of host memory.
_CONCURRENT_GB = 16
# Of them, how much a save copies to the host at once, for the parameters and for the rest of the state each. The memory
# is made at the first save, in a virtual machine slower than a disk writes, and used again and again from then on.
_TRANSFER_GB = 8
# Large arrays are stored in pieces and in files of this size, so that all processors read and write them.
_PIECE_BYTES = 256 * 2**20
# Where several devices have the same array, each writes a part that is at least so large: a cut has to be compiled.
_PART_BYTES = 2**16


def create_manager(directory: pathlib.Path, config: CheckpointConfig, num_failures: int = 0) -> ocp.CheckpointManager:
    """The manager of a run's directory.

    At a save that failed each process may have waited for the others another number of times; they find each other
    again at barriers that are named after the number of failures.
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
        # Metrics are only written when there is a function to rank by.
        best_fn=lambda metrics: metrics[SCORE],
        preservation_policy=policies.AnyPreservationPolicy(keep),
        # The writer has a thread of its own, in which the copy to the host happens as well.
        enable_async_checkpointing=False,
        # Named processes wait for each other through the coordinator. Without names they would do it with
        # a collective on the devices, which must not get between those of the train step.
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())) if several else None,
            barrier_sync_key_prefix=f"acrlpd{num_failures}" if several else None,
        ),
    )
    return ocp.CheckpointManager(directory, options=options, item_handlers=_item_handlers())


def _item_handlers() -> dict[str, ocp.CheckpointHandler]:
    return {
        PARAMS: array_handler(),
        TRAIN_STATE: array_handler(),
        RUN: ocp.JsonCheckpointHandler(filename=RUN_FILE),
        ASSETS: AssetsHandler(),
    }


class _CopiedInTurn(serialization.DefaultSerializationStatusCallback):
    """Makes Orbax keep to `_TRANSFER_GB`: by default it copies all before it writes any, so that they may change."""

    def key_priority(self, _: Any) -> serialization.TransferPriority:
        return serialization.TransferPriority.ASYNCHRONOUS_PRIORITIZED


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Zarr 2 in OCDBT is what openpi's orbax reads.

    Weights compress by a few per cent, for half of a save's and a restore's processor time: they are not.
    """
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_PART_BYTES,
        callback=_CopiedInTurn(),
        array_metadata_store=array_metadata_store.Store(),
    )
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
