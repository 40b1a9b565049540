"""Checkpoints are read onto any number of devices, whatever devices wrote them."""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from acrlpd.agents import Agent
from acrlpd.checksums import verified
from acrlpd.config import RLTrainConfig
from acrlpd.config.tree import from_dict
from acrlpd.models.openpi_checkpoint import shape_differences
from acrlpd.runs.checkpoint_layout import (
    HUB_FILE,
    TRAIN_STATE,
    CheckpointError,
    load_checkpoint_metadata,
    newest_step_directory,
)
from acrlpd.training.checkpoints.agent_items import agent_from_items, agent_items
from acrlpd.training.checkpoints.items import RestoreArrays, array_handler
from acrlpd.training.sharding import FSDPSharding, abstract_train_state, create_fsdp_mesh

Names = tuple[str, ...]  # from the root of an item to an array


def load_checkpoint_agent(
    path: str | pathlib.Path,
    rl_config: RLTrainConfig | None = None,
    sharding: FSDPSharding | None = None,
) -> tuple[Agent, int]:
    """The agent and the step of a checkpoint: a step directory, or the newest of a run directory.

    The default config is the one that the checkpoint was written with. The default sharding is that of the
    config, with fewer devices for each copy of the state where not as many are here.
    """
    directory = newest_step_directory(path)
    if (directory / HUB_FILE).exists() and not (directory / TRAIN_STATE).exists():
        raise CheckpointError(
            f"{directory} came from the hub without the state of the optimizers, which updates need: "
            "`acrlpd push --train_state` uploads it. A new run can start from the policy and the critics that are "
            f"here: `acrlpd train --load critics,policy {directory}`"
        )
    metadata = load_checkpoint_metadata(directory)
    rl_config = rl_config or from_dict(RLTrainConfig, metadata["config"])
    if sharding is None:
        mesh = create_fsdp_mesh(math.gcd(rl_config.fsdp.fsdp_devices, jax.device_count()))
        sharding = FSDPSharding(mesh, rl_config.fsdp.min_size_mib)
    return restore_agent(directory, abstract_train_state(rl_config, sharding)), metadata["step"]


def restore_agent(step_directory: pathlib.Path, abstract_agent: Agent) -> Agent:
    """Reads the arrays of a checkpoint straight into the places of `abstract_agent`, on any devices."""
    average, wanted = _wanted_items(step_directory, abstract_agent)
    with verified(*(step_directory / name for name in wanted), share=(jax.process_index(), jax.process_count())):
        items = {name: _restore_item(step_directory / name, tree) for name, tree in wanted.items()}
    return agent_from_items(abstract_agent, items, average=average)


def require_fitting(step_directory: pathlib.Path, abstract_agent: Agent) -> None:
    """Refuses a checkpoint whose arrays have other names or shapes than those of the agent; reads no array."""
    _, wanted = _wanted_items(step_directory, abstract_agent)
    for name, tree in sorted(wanted.items()):
        with _reading(step_directory / name) as checkpointer:
            _check_shapes(step_directory / name, checkpointer, traverse_util.flatten_dict(tree))


def require_equal_shapes(directory: pathlib.Path, wanted: Mapping[Names, Any], within: Names) -> None:
    """Refuses an item of a checkpoint whose branch `within` has other names or shapes than `wanted`."""
    with _reading(directory) as checkpointer:
        _check_shapes(directory, checkpointer, wanted, within)


def _wanted_items(step_directory: pathlib.Path, abstract_agent: Agent) -> tuple[bool, dict[str, Any]]:
    """Whether params/ holds the moving average, and the arrays of the agent by their places in the checkpoint."""
    average = load_checkpoint_metadata(step_directory)["params_hold_average"]
    if average and abstract_agent.ema_params is None:
        raise CheckpointError(
            f"{step_directory} holds a moving average of the policy, for which this config has no place: set "
            f"acrlpd.ema_decay"
        )
    return average, agent_items(abstract_agent, average=average)


@contextlib.contextmanager
def _reading(directory: pathlib.Path) -> Iterator[ocp.Checkpointer]:
    """Reads an item of a checkpoint, and says in plain words what is wrong with it."""
    with ocp.Checkpointer(array_handler()) as checkpointer:
        try:
            yield checkpointer
        except (CheckpointError, jax.errors.JaxRuntimeError):  # The arrays do not fit the config, or the devices.
            raise
        except Exception as error:  # Orbax raises plain Exception around the errors of tensorstore.
            reason = str(error).splitlines()[0].partition(". See full")[0]
            raise CheckpointError(
                f"{directory} is damaged or incomplete: {reason}. Without {directory.parent} "
                "the run goes on from the checkpoint before it"
            ) from error


def _restore_item(directory: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    with _reading(directory) as checkpointer:
        _check_shapes(directory, checkpointer, traverse_util.flatten_dict(wanted))
        restore_args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype), wanted)
        return checkpointer.restore(directory, RestoreArrays(wanted, restore_args))


def _check_shapes(
    directory: pathlib.Path, checkpointer: ocp.Checkpointer, wanted: Mapping[Names, Any], within: Names = ()
) -> None:
    metadata = checkpointer.metadata(directory).item_metadata
    if metadata is None:
        raise CheckpointError(f"{directory} is damaged or incomplete: it does not say which arrays it holds")
    found = traverse_util.flatten_dict(metadata.tree)
    stored = {"/".join(name): leaf.shape for name, leaf in found.items() if name[: len(within)] == within}
    problems = shape_differences(stored, {"/".join(name): wanted[name] for name in sorted(wanted)})
    if problems:
        shown = problems[:10] + ([f"... and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise CheckpointError(f"{directory} does not fit this config:\n  " + "\n  ".join(shown))
