"""How a run stops early: SIGINT and SIGTERM, and one step at which all processes of the run stop."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax

from acrlpd.training.distributed import coordinator_client

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEY = "acrlpd/stop/"


class StopRequest:
    """The first signal asks for a checkpoint and an orderly end; a second signal ends the process.

    All processes stop at the same step, which the process that got the signal proposes to the others. No process
    starts a step before all processes have started the step `in_flight` steps earlier. The proposed step lies a little
    further ahead, so every process sees the proposal in time, and no step needs a collective for this.
    """

    def __init__(self) -> None:
        self._margin = 2
        self._received: int | None = None  # the signal that this process got
        self._agreed: tuple[int, int] | None = None  # the step, and the signal that some process got

    def allow_for(self, in_flight: int) -> None:
        """A process may have started so many steps that other processes have not started."""
        self._margin = max(self._margin, 2 * in_flight + 2)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals while entered. Only the main thread of a process can take signals."""
        is_main = threading.current_thread() is threading.main_thread()
        previous = {number: signal.signal(number, self._handle) for number in _SIGNALS} if is_main else {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # os.write, because the signal may have interrupted the logging module.
        if self._received is not None:
            os.write(2, b"\nacrlpd: stopped at once; the newest complete checkpoint is kept\n")
            os._exit(exit_code(number))
        self._received = number
        name = signal.Signals(number).name
        text = f"\nacrlpd: {name}: saving after the current step, then ending; a second signal ends the run at once\n"
        os.write(2, text.encode())

    @property
    def is_requested(self) -> bool:
        """Whether this process got a signal."""
        return self._received is not None

    def check(self, step: int) -> int | None:
        """Before `step` is started: the signal to stop for, or None if the run goes on."""
        client = coordinator_client()
        if client is None:
            return self._received
        if self._received is not None and self._agreed is None:
            try:
                client.key_value_set(f"{_KEY}at", f"{step + self._margin} {self._received}")
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):  # Another process was faster: its proposal counts.
                    raise
        if self._agreed is None:
            for _, value in client.key_value_dir_get(_KEY):
                last_step, number = map(int, value.split())
                self._agreed = last_step, number
        return self._agreed[1] if self._agreed is not None and step >= self._agreed[0] else None


def exit_code(number: int) -> int:
    """The exit code that shells expect of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number
