"""Checkpoints: written while training goes on, complete or absent, and read onto any number of devices.

A save takes a copy of the state on the devices, because the next step overwrites the original, and hands the
copy to a thread that moves it to the host and to disk. The step directory gets its name only when everything is
in it; only then are older ones removed.
"""

import concurrent.futures
import contextlib
import copy
import json
import logging
import math
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.experimental import multihost_utils

from acrlpd.agents import Agent
from acrlpd.checksums import verified
from acrlpd.config import RLTrainConfig
from acrlpd.config.tree import from_dict
from acrlpd.models.openpi_checkpoint import shape_differences, verify_openpi_checkpoint_compatibility
from acrlpd.policies.checkpoint import critic_branches
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    CRITIC,
    HUB_FILE,
    PARAMS,
    RUN,
    RUN_FILE,
    TRAIN_STATE,
    CheckpointError,
    load_checkpoint_metadata,
    newest_step_directory,
)
from acrlpd.runs.directory import saved_steps
from acrlpd.training.checkpoints.items import (
    PIECE_BYTES,
    SCORE,
    RestoreArrays,
    SaveArrays,
    SaveFiles,
    array_handler,
    create_manager,
)
from acrlpd.training.checkpoints.metadata import create_checkpoint_metadata, describe_rng
from acrlpd.training.distributed import problems_elsewhere
from acrlpd.training.sharding import FSDPSharding, abstract_train_state, create_fsdp_mesh

logger = logging.getLogger(__name__)

# What tensorstore adds to the message of an error, pages of it.
_DETAILS = re.compile(r" \[(os_error_code|tensorstore_spec|source locations)=.*", re.DOTALL)
Names = tuple[str, ...]  # from the root of an item to an array
# Seconds of waiting for a save after which a warning says so, again and again.
SLOW_SAVE_S = 120.0


class SaveFailedError(OSError):
    """Checkpoints could not be written too many times in a row."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, in a thread.

    A save that fails is reported and counted, and training goes on; `checkpoints.max_failures` in a row end the run.
    """

    def __init__(self, directory: pathlib.Path, rl_config: RLTrainConfig, assets: Mapping[str, bytes]) -> None:
        """`assets` are files that every checkpoint carries for openpi, by their path below assets/."""
        self.directory = directory
        self.newest_step: int | None = None  # the newest step whose checkpoint is complete on disk
        self.num_failures = 0  # over the run
        self._failures_in_a_row = 0
        self._rl_config = rl_config
        self._assets = assets
        self._verify = rl_config.openpi_compatibility.validate_openpi_compatibility
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Orbax leaves errors of single arrays unread
        self._manager = create_manager(directory, rl_config.checkpoints)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="acrlpd-checkpoint")
        self._num_saves = 0
        self._running: tuple[int, concurrent.futures.Future[None]] | None = None
        self._on_device: bool | None = None
        self._copy_on_devices: jax.stages.Compiled | None = None

    def items(self, agent: Agent) -> dict[str, Any]:
        """The arrays of an agent as a checkpoint of this run holds them."""
        return agent_items(agent, average=self._rl_config.acts_with_average)

    def prepare(self, agent: Agent) -> None:
        """Compiles what a save needs, so that the first save does not hold up training."""
        copy_items = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._copy_on_devices = copy_items.lower(self.items(agent)).compile()

    def save(
        self, agent: Agent, step: int, *, rng: jax.Array, state: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Starts to write the complete run at `step`; returns when agent and state may be changed.

        `state` is what the caller wants to find again in run.json; a higher `score` is a better policy. Waits
        for a save that is still under way.
        """
        self.wait()
        average = self._rl_config.acts_with_average
        run = create_checkpoint_metadata(self._rl_config, step, average=average, assets=self._assets)
        metadata = run | {"rng": describe_rng(rng)} | copy.deepcopy(dict(state))
        copied = self._copy(agent)
        self._num_saves += 1
        self._running = step, self._thread.submit(self._write, step, copied, metadata, score)

    def poll(self) -> None:
        """Looks whether a save has ended, without waiting; raises after too many failures in a row."""
        if self._running is None or not self._running[1].done():
            return
        step, future = self._running
        self._running = None
        error = future.exception()
        if error is None:
            self._failures_in_a_row = 0
            self.newest_step = step
            logger.info("saved checkpoint %s", self.directory / str(step))
            return
        if not isinstance(error, Exception):
            raise error
        self.num_failures += 1
        self._failures_in_a_row += 1
        self._remove_leftovers()
        steps = saved_steps(self.directory)
        kept = f"the checkpoint of step {steps[-1]} stays" if steps else "there is no earlier checkpoint"
        message = f"the checkpoint of step {step} could not be written ({_reason(error)}); {kept}"
        max_failures = self._rl_config.checkpoints.max_failures
        if self._failures_in_a_row >= max_failures:
            raise SaveFailedError(
                f"{message}. That was failure {self._failures_in_a_row} in a row "
                f"(checkpoints.max_failures={max_failures}): stopping"
            ) from error
        logger.error("%s; training goes on", message)

    def wait(self) -> None:
        """Waits for a save that is under way, and says so if the wait is long; raises as `poll`."""
        if self._running is None:
            return
        step, future = self._running
        while not concurrent.futures.wait([future], SLOW_SAVE_S).done:
            logger.warning(
                "the checkpoint of step %d is still being written, and training waits for it. The disk is slow, or the "
                "clock of this machine was set back: tensorstore then waits until the clock has caught up",
                step,
            )
        self.poll()

    def close(self) -> None:
        """Waits for a save that is under way and ends the thread; an error of that save is logged."""
        try:
            self.wait()
        except SaveFailedError as error:
            logger.error("%s", error)
        self._thread.shutdown()
        self._manager.close()

    def _write(self, step: int, arrays: Mapping[str, Any], metadata: Mapping[str, Any], score: float | None) -> None:
        with _one_outcome(f"save {self._num_saves}"):
            if self.num_failures:  # A new manager looks at the disk, and has barriers with new names.
                self._remove_leftovers()
                old = self._manager
                self._manager = create_manager(self.directory, self._rl_config.checkpoints, self.num_failures)
                old.close()
            items: dict[str, Any] = {name: _save_arrays(tree) for name, tree in arrays.items()}
            items[RUN] = SaveFiles({RUN_FILE: json.dumps(metadata).encode()}, checksums=True)
            if self._assets:
                items[ASSETS] = SaveFiles(self._assets)
            metrics = None if score is None else {SCORE: score}
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)
            if self._verify and self._rl_config.model.in_openpi:
                problems = verify_openpi_checkpoint_compatibility(self.directory / str(step), self._rl_config.model)
                if problems:
                    raise CheckpointError("openpi would not load it:\n  " + "\n  ".join(problems))
                self._verify = False  # The names do not change within a run.

    def _copy(self, agent: Agent) -> dict[str, Any]:
        """A copy of the agent's arrays that the next step, which overwrites the originals, leaves alone.

        A copy on the devices takes no time; where it does not fit beside a step, the copy goes to the host.
        """
        items = self.items(agent)
        if self._on_device is None:
            fits = _fits_beside_a_step(items)
            if jax.process_count() > 1:  # All processes must run the same program.
                fits = bool(multihost_utils.broadcast_one_to_all(np.asarray(fits)))
            self._on_device = fits
        if self._on_device:
            if self._copy_on_devices is None:
                self.prepare(agent)
            assert self._copy_on_devices is not None
            try:
                return self._copy_on_devices(items)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or jax.process_count() > 1:
                    raise
                self._on_device = False  # Other arrays have grown since the first save.
        on_host = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), items)
        return jax.block_until_ready(on_host)

    def _remove_leftovers(self) -> None:
        """Removes what failed saves left: it may be what fills the disk."""
        if jax.process_index() == 0:
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)  # What is still being written goes the next time.


def write_checkpoint(
    directory: pathlib.Path,
    rl_config: RLTrainConfig,
    agent: Agent,
    step: int,
    *,
    rng: jax.Array,
    state: Mapping[str, Any],
    assets: Mapping[str, bytes],
) -> bool:
    """Writes one checkpoint, as a run would; returns whether it is complete. The log says why it is not."""
    directory.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(directory, rl_config, assets)
    try:
        writer.save(agent, step, rng=rng, state=state)
        writer.wait()
    finally:
        writer.close()
    return writer.newest_step == step


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_DETAILS.sub('', str(error))}"


def _save_arrays(tree: Any) -> SaveArrays:
    pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=PIECE_BYTES), tree)
    return SaveArrays(tree, save_args=pieces, ocdbt_target_data_file_size=PIECE_BYTES)


@contextlib.contextmanager
def _one_outcome(name: str) -> Iterator[None]:
    """Makes a save that fails on one process fail on all: they must agree on which checkpoints exist."""
    try:
        yield
    except Exception as error:
        problems_elsewhere(name, _reason(error))
        raise
    if problems := problems_elsewhere(name, None):
        process, problem = next(iter(problems.items()))
        raise CheckpointError(f"process {process} could not write its part: {problem}")


def _fits_beside_a_step(tree: Any) -> bool:
    """Whether a copy fits on the devices while a step runs; the first step has shown the memory that a step needs."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return True
    shards = (x.addressable_shards for x in jax.tree.leaves(tree))
    needed = sum(shard.data.nbytes for leaf in shards for shard in leaf if shard.device == device)
    return stats["bytes_limit"] - stats["peak_bytes_in_use"] > needed


def agent_items(agent: Agent, *, average: bool) -> dict[str, Any]:
    """The arrays of an agent (or their shapes) as the items params/, critic/ and train_state/: nested dicts by name.

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

    No array is stored twice. What is neither of the policy nor needed to choose among candidates lies in train_state/,
    under the names of the agent's fields, so a new field of the agent is stored without a change here.
    """
    policy_fields = ("ema_params" if average else "policy_params", "frozen_params")
    branches = critic_branches(agent.algorithm.acrlpd).values()
    stored: dict[tuple[str, ...], Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(agent)[0]:
        name = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if name[0] in policy_fields:
            stored[PARAMS, "params", *name[1:]] = leaf  # openpi's tree, in which each array is called "value"
            continue
        item = CRITIC if any(name[: len(branch)] == branch for branch in branches) else TRAIN_STATE
        stored[item, *(name[:-1] if name[-1] == "value" else name)] = leaf
    return stored


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
