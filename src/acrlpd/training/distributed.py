"""Many processes as one run: joining them, waiting for each other, stopping together, noticing a death."""

import ctypes
import dataclasses
import os
import signal
import sys
from typing import Any

import jax

# Seconds without a sign of life after which a process counts as dead. Long enough for a busy host, short
# enough that the others do not burn hours.
HEARTBEAT_TIMEOUT_S = 30
# Seconds that processes wait for each other at a barrier: the slowest may be reading weights.
BARRIER_TIMEOUT_S = 600.0
# Seconds that processes wait to hear how something ended elsewhere: a save may take long, and fail late.
OUTCOME_TIMEOUT_S = 3600.0


class PeerError(RuntimeError):
    """Another process of the run did not come or has gone."""


@dataclasses.dataclass(frozen=True)
class DistributedOptions:
    """How the processes of a run find each other; all unset: there is only this one."""

    # Find the other processes through the cluster (Slurm, Open MPI, Kubernetes, TPU).
    distributed: bool = False
    # host:port of process 0, for all processes; else $JAX_COORDINATOR_ADDRESS.
    coordinator: str | None = None
    # Processes of the run; else $JAX_NUM_PROCESSES.
    num_processes: int | None = None
    # Which of them this is, from 0; else $JAX_PROCESS_ID.
    process_id: int | None = None

    def resolved(self) -> "DistributedOptions":
        """With what the environment says where nothing is given."""
        return dataclasses.replace(
            self,
            coordinator=self.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
            num_processes=_given_or_environment(self.num_processes, "JAX_NUM_PROCESSES"),
            process_id=_given_or_environment(self.process_id, "JAX_PROCESS_ID"),
        )


def _given_or_environment(value: int | None, name: str) -> int | None:
    text = os.environ.get(name)
    if value is not None or not text:
        return value
    if not text.isdigit():
        raise ValueError(f"${name} must be a whole number; found {text!r}")
    return int(text)


def initialize_distributed(options: DistributedOptions) -> bool:
    """Joins the other processes, if there are any. Must come before the first use of a device."""
    options = options.resolved()
    given = {
        "--coordinator": options.coordinator,
        "--num_processes": options.num_processes,
        "--process_id": options.process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and not options.distributed:
        return False
    if missing and not options.distributed:
        raise ValueError(
            f"a run of several processes needs {', '.join(given)} together; missing: {', '.join(missing)}. "
            "On a cluster that JAX knows, --distributed finds them"
        )
    # The stop of a run is agreed between the processes by `AgreedStop`, not by JAX's own SIGTERM handler.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            options.coordinator,
            options.num_processes,
            options.process_id,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            # A peer that is gone at the end must not hold the others up for long.
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the processes of the run could not find each other (coordinator {options.coordinator}, "
            f"process {options.process_id} of {options.num_processes}): {error}"
        ) from error
    _explain_aborts()
    if jax.default_backend() == "cpu":
        # Only process 0 would find its programs again, and with jaxlib 0.11 those exchanged arrays in another order
        # than the ones that the others had compiled anew.
        jax.config.update("jax_enable_compilation_cache", False)
    return True


def is_primary() -> bool:
    """Whether this process is the one that writes logs and shows progress."""
    return jax.process_index() == 0


def barrier(name: str, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
    """Waits until all processes are here. The name must be used once."""
    client = _client()
    if client is None:
        return
    try:
        client.wait_at_barrier(f"acrlpd/{name}", int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise PeerError(
            f"process {jax.process_index()} of {jax.process_count()} waited {timeout_s:.0f} s at {name!r} for "
            f"processes that did not come: {error}"
        ) from error


def problems_elsewhere(name: str, problem: str | None) -> dict[int, str]:
    """Tells the other processes how something ended here, with what `problem` if any, and hears how it did there.

    Returns the problems of the others, by process. The name must be used once.
    """
    client = _client()
    if client is None:
        return {}
    key, here = f"acrlpd/outcome/{name}/", jax.process_index()
    client.key_value_set(f"{key}{here}", problem or _NO_PROBLEM)
    others = (process for process in range(jax.process_count()) if process != here)
    found = {i: client.blocking_key_value_get(f"{key}{i}", int(OUTCOME_TIMEOUT_S * 1000)) for i in others}
    return {process: text for process, text in found.items() if text != _NO_PROBLEM}


_NO_PROBLEM = "none"


class AgreedStop:
    """One step at which all processes of a run stop, proposed by whoever was asked to.

    Processes follow each other closely: none starts a step before all have started the one `in_flight`
    before it. So a proposal for a step a little further ahead is seen by everyone before they get there,
    and all leave the loop at the same step, without a collective of its own in every step.
    """

    _KEY = "acrlpd/stop/"

    def __init__(self, in_flight: int) -> None:
        self._margin = 2 * in_flight + 2
        self._signal: int | None = None
        self._step: int | None = None

    def check(self, step: int, signal_number: int | None) -> int | None:
        """Before `step` is started: the signal to stop for, if this is where everyone stops."""
        client = _client()
        if client is None:
            return signal_number
        if signal_number is not None and self._step is None:
            self._propose(client, step + self._margin, signal_number)
        if self._step is None:
            for _, value in client.key_value_dir_get(self._KEY):
                self._step, self._signal = map(int, value.split())
        return self._signal if self._step is not None and step >= self._step else None

    def _propose(self, client: Any, step: int, signal_number: int) -> None:
        try:
            client.key_value_set(f"{self._KEY}at", f"{step} {signal_number}")
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):  # somebody else was faster: theirs counts
                raise


def _client() -> Any | None:
    """The connection to the coordinator. JAX has no public way to barriers with a time-out."""
    from jax._src import distributed

    return distributed.global_state.client


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_signal_number: int) -> None:
    sys.stderr.flush()
    os.write(2, f"\nacrlpd: process {_PROCESS[0]} of {_PROCESS[1]} ends {_REASON}\n".encode())
    os._exit(1)


_PROCESS = (0, 1)
_REASON = (
    "because JAX gave up on the run (its reason is above). Most often another process died or its host is "
    "unreachable: look at the other processes' output, then start all of them again with --resume; nothing before the "
    "newest checkpoint is lost."
)


def expect_abort() -> None:
    """This process has failed, and JAX will give up on the run because it leaves: nothing is wrong with the others."""
    global _REASON
    _REASON = "because of its own error above (before what JAX says), and the other processes with it."


def _explain_aborts() -> None:
    """Makes an abort of JAX's coordination end with a message that says what to do.

    When a peer dies, JAX aborts this process from a thread of its own, whatever the main thread is
    waiting for. Python's signal handlers do not run then; one in C does.
    """
    global _PROCESS
    _PROCESS = (jax.process_index(), jax.process_count())
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, type(_on_abort)]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, _on_abort)
