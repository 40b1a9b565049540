"""How Orbax reads and writes the items of a step directory (`runs.checkpoint_layout`)."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

# Private, because Orbax has no public name for the order in which arrays are copied to the host.
from orbax.checkpoint._src.serialization import types as serialization

from acrlpd.checksums import write_checksums
from acrlpd.config import CheckpointConfig
from acrlpd.runs.checkpoint_layout import ASSETS, CRITIC, PARAMS, RUN, TRAIN_STATE

SCORE = "score"
METRICS = "metrics"  # the item in which Orbax keeps the score
# So many GB of arrays may be on their way between devices and disk at the same time. Without this bound, the restore
# of a full-size state ran out of host memory.
_CONCURRENT_GB = 16
# A save copies so many GB to the host at once, for each item. The first save allocates this memory, which is slower
# than the disk in a virtual machine, and later saves use it again.
_TRANSFER_GB = 8
# Large arrays are stored in pieces and in files of this size, so that all processors read and write them.
PIECE_BYTES = 256 * 2**20
# Devices that have the same array each write a part of it. A part has at least this size, because each cut of an
# array has to be compiled.
_PART_BYTES = 2**16


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
        CRITIC: array_handler(),
        TRAIN_STATE: array_handler(),
        RUN: _FilesHandler(),
        ASSETS: _FilesHandler(),
    }
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


class _CopiedInTurn(serialization.DefaultSerializationStatusCallback):
    """Makes Orbax keep to `_TRANSFER_GB`. By default it copies all arrays before it writes any of them."""

    def key_priority(self, _: Any) -> serialization.TransferPriority:
        return serialization.TransferPriority.ASYNCHRONOUS_PRIORITIZED


class _ArrayHandler(ocp.PyTreeCheckpointHandler):
    """Adds the checksums of all files of an item before the item gets its name."""

    def finalize(self, directory: epath.Path) -> None:
        """Orbax calls this on one process, in the writer's thread, after all processes have written their files.

        The step directory gets its name later, so a checkpoint has all of its checksums or is absent.
        """
        super().finalize(directory)
        write_checksums(pathlib.Path(directory))


# Orbax finds the handler of an item by the class of the arguments.
@ocp.args.register_with_handler(_ArrayHandler, for_save=True)
@dataclasses.dataclass
class SaveArrays(ocp.args.PyTreeSave):
    """The arrays of an item."""


@ocp.args.register_with_handler(_ArrayHandler, for_restore=True)
@dataclasses.dataclass
class RestoreArrays(ocp.args.PyTreeRestore):
    """The arrays to read of an item, as shapes."""


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Reads and writes a tree of arrays as Zarr 2 in OCDBT, which openpi's Orbax reads.

    Arrays are not compressed: weights shrink by a few per cent only, for half of the processor time of a save.
    """
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_PART_BYTES, callback=_CopiedInTurn())
    return _ArrayHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_ocdbt=True,
        use_zarr3=False,
        use_compression=False,
        save_concurrent_gb=_CONCURRENT_GB,
        save_device_host_concurrent_gb=_TRANSFER_GB,
        restore_concurrent_gb=_CONCURRENT_GB,
    )


class _FilesHandler(ocp.CheckpointHandler):
    """Writes small files into an item of a step directory."""

    def save(self, directory: epath.Path, args: "SaveFiles") -> None:
        if jax.process_index() != 0:
            return
        for name, content in args.files.items():
            path = pathlib.Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if args.checksums:
            write_checksums(pathlib.Path(directory))

    def restore(self, directory: epath.Path, args: ocp.args.CheckpointArgs) -> None:
        raise NotImplementedError(f"{directory} holds plain files: read them without Orbax")


@ocp.args.register_with_handler(_FilesHandler, for_save=True, for_restore=True)  # Orbax wants both.
@dataclasses.dataclass
class SaveFiles(ocp.args.CheckpointArgs):
    """The files of an item: relative path -> content."""

    files: Mapping[str, bytes]
    checksums: bool = False  # assets/ has the SHA-256 in run.json instead
