"""Checkpoints are written while training goes on, and each one is complete or absent.

A save takes a copy of the state on the devices, because the next step overwrites the original, and hands the
copy to a thread that moves it to the host and to disk. The step directory gets its name only when everything is
in it; only then are older ones removed.
"""

import concurrent.futures
import contextlib
import copy
import json
import logging
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.models.openpi_checkpoint import verify_openpi_checkpoint_compatibility
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    RUN,
    RUN_FILE,
    CheckpointError,
)
from acrlpd.runs.directory import saved_steps
from acrlpd.training.checkpoints.agent_items import agent_items
from acrlpd.training.checkpoints.items import (
    PIECE_BYTES,
    SCORE,
    SaveArrays,
    SaveFiles,
    create_manager,
)
from acrlpd.training.checkpoints.metadata import create_checkpoint_metadata, describe_rng
from acrlpd.training.distributed import problems_elsewhere

logger = logging.getLogger(__name__)

# What tensorstore adds to the message of an error, pages of it.
_DETAILS = re.compile(r" \[(os_error_code|tensorstore_spec|source locations)=.*", re.DOTALL)
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
