"""Many processes as one run: they join, wait for each other, and explain why they end when another process dies."""

import ctypes
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from acrlpd.config.command_line import Flag
from acrlpd.files import is_whole_number

# Seconds without a sign of life after which a process counts as dead. A busy host may be silent nearly as long, and the
# other processes must not wait for hours.
HEARTBEAT_TIMEOUT_S = 30
# Seconds that processes wait for each other at a barrier: the slowest process may be reading weights.
BARRIER_TIMEOUT_S = 600.0
# Seconds that a process waits to hear how a save ended on the others: a save may take long, and fail late.
OUTCOME_TIMEOUT_S = 3600.0
_SUCCESS = "success"
# What errors of JAX name when an exchange with another process has failed: the library of the exchange, or gRPC's word
# for a coordinator that does not answer.
_EXCHANGE_FAILED = re.compile("gloo|nccl|UNAVAILABLE", re.IGNORECASE)


class PeerError(RuntimeError):
    """Another process of the run did not come or has gone."""


@dataclasses.dataclass(frozen=True)
class DistributedOptions:
    """How the processes of a run find each other. Without any of these options the run has one process."""

    # Several processes on a cluster that JAX knows (Slurm, Open MPI, Kubernetes, TPU).
    distributed: Flag = False
    # Several processes elsewhere: host:port of process 0; else $JAX_COORDINATOR_ADDRESS.
    coordinator: str | None = None
    # The number of processes; else $JAX_NUM_PROCESSES.
    num_processes: int | None = None
    # The number of this process, from 0; else $JAX_PROCESS_ID.
    process_id: int | None = None


def initialize_distributed(options: DistributedOptions) -> bool:
    """Joins the other processes of the run, if there are any. Must come before the first use of a device."""
    given = {
        "--coordinator": options.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "--num_processes": _given_or_environment(options.num_processes, "JAX_NUM_PROCESSES"),
        "--process_id": _given_or_environment(options.process_id, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and not options.distributed:
        return False
    if missing and not options.distributed:
        raise ValueError(
            f"a run of several processes needs {', '.join(given)} together; missing: {', '.join(missing)}. "
            "On a cluster that JAX knows, --distributed finds them"
        )
    # `StopRequest` agrees on the last step between the processes, not JAX's own SIGTERM handler.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator, num_processes, process_id = given.values()
    try:
        jax.distributed.initialize(
            coordinator,  # type: ignore[arg-type]
            num_processes,  # type: ignore[arg-type]
            process_id,  # type: ignore[arg-type]
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            # A process that has died must not hold the others up for long at the end.
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the processes of the run could not find each other (coordinator {coordinator}, "
            f"process {process_id} of {num_processes}): {error}"
        ) from error
    _explain_aborts()
    if jax.default_backend() == "cpu":
        # JAX lets only process 0 write to the cache. With jaxlib 0.11 a program from the cache exchanged arrays in
        # another order than the same program that the other processes had compiled.
        jax.config.update("jax_enable_compilation_cache", False)
    return True


def _given_or_environment(value: int | None, name: str) -> int | None:
    text = os.environ.get(name)
    if value is not None or not text:
        return value
    if not is_whole_number(text):
        raise ValueError(f"${name} must be a whole number; found {text!r}")
    return int(text)


def is_primary() -> bool:
    """Whether this process is the one that writes logs and shows progress."""
    return jax.process_index() == 0


def coordinator_client() -> Any | None:
    """The connection to the coordinator; None in a run of one process.

    The import is private because JAX has no public barrier with a time-out and no public store of keys and values.
    """
    from jax._src import distributed

    return distributed.global_state.client


def barrier(name: str, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
    """Waits until all processes are here. Each name may be used once."""
    client = coordinator_client()
    if client is None:
        return
    try:
        client.wait_at_barrier(f"acrlpd/{name}", int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise PeerError(
            f"process {jax.process_index()} of {jax.process_count()} waited {timeout_s:.0f} s at {name!r} for "
            f"processes that did not come: {error}"
        ) from error


def numbers_of_first_process(numbers: Mapping[str, float]) -> dict[str, float]:
    """What process 0 has measured, to the bit, in all processes; all must call this with the same names.

    Processes that measure the same may differ in the last digit. What they decide by it together, such as a save, must
    not differ.
    """
    if jax.process_count() == 1 or not numbers:
        return dict(numbers)
    own = np.array(list(numbers.values()), np.float64).view(np.uint8)  # as bytes, because JAX would round to float32
    values = np.asarray(multihost_utils.broadcast_one_to_all(own)).view(np.float64)
    return dict(zip(numbers, values.tolist(), strict=True))


def peer_error(error: BaseException) -> PeerError | None:
    """The error to show if another process was lost in an exchange of arrays; None if `error` is of this process."""
    if isinstance(error, PeerError):
        return error
    if not isinstance(error, jax.errors.JaxRuntimeError) or not _EXCHANGE_FAILED.search(str(error)):
        return None
    who = f"process {jax.process_index()} of {jax.process_count()}"
    return PeerError(f"{who} lost the connection to another process: {error}")


def problems_elsewhere(name: str, problem: str | None) -> dict[int, str]:
    """Tells the other processes how something ended here, and returns their problems by process.

    `problem` is None if all went well here. Each name may be used once.
    """
    client = coordinator_client()
    if client is None:
        return {}
    key, here = f"acrlpd/outcome/{name}/", jax.process_index()
    client.key_value_set(f"{key}{here}", problem or _SUCCESS)
    others = (process for process in range(jax.process_count()) if process != here)
    outcomes = {i: client.blocking_key_value_get(f"{key}{i}", int(OUTCOME_TIMEOUT_S * 1000)) for i in others}
    return {process: outcome for process, outcome in outcomes.items() if outcome != _SUCCESS}


_PROCESS = (0, 1)
_REASON = (
    "because JAX gave up on the run (its reason is above). Most often another process died or its host is "
    "unreachable: look at the other processes' output, then start all of them again with --resume; nothing before the "
    "newest checkpoint is lost."
)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_signal_number: int) -> None:
    sys.stderr.flush()
    os.write(2, f"\nacrlpd: process {_PROCESS[0]} of {_PROCESS[1]} ends {_REASON}\n".encode())
    os._exit(1)


def expect_abort() -> None:
    """To be called when this process has failed: JAX then aborts the run, and the other processes are not at fault."""
    global _REASON
    _REASON = "because of its own error above (before what JAX says); the other processes end with it."


def _explain_aborts() -> None:
    """Makes an abort by JAX end with a message that says what to do.

    When a process dies, JAX aborts the others from a thread of its own, whatever their main threads are waiting
    for. Signal handlers of Python do not run then; a handler in C does.
    """
    global _PROCESS
    _PROCESS = (jax.process_index(), jax.process_count())
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, type(_on_abort)]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, _on_abort)
