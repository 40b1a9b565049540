"""Measures a scenario in a process of its own: its peak of memory and its compiled programs are then its own."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

from acrlpd.regression.baseline import Measurement
from acrlpd.regression.measure import MeasurementError, measure
from acrlpd.regression.scenario import Scenario


def measure_apart(scenario: Scenario) -> Measurement:
    """As `measure`. An error in the other process is raised here."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(scenario, sender))
    process.start()
    sender.close()  # The other process has the only end to write to: the pipe ends with the process.
    try:
        result = receiver.recv()
    except EOFError as error:
        process.join()
        raise MeasurementError(
            f"scenario {scenario.name}: its process ended with the code {process.exitcode} (-9: killed, perhaps for "
            "lack of memory); no baseline was changed"
        ) from error
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _measure_into(scenario: Scenario, sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result: Measurement | Exception = measure(scenario)
    except (ValueError, OSError, ImportError) as error:  # Any other error is a bug and shows its traceback.
        result = error
    sender.send(result)


def _end_with_parent() -> None:
    """A command that was killed needs no measurement. The training ends by itself, and its directory is removed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
