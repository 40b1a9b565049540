"""SIGINT and SIGTERM: the first one asks for a checkpoint and an orderly end, the second ends at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, signals only leave a note, which the train loop reads between two steps."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os.write(2, b"\nacrlpd: stopped at once; the newest complete checkpoint is kept\n")
            os._exit(exit_code(number))
        self.received = number
        name = signal.Signals(number).name
        # Not through logging: the signal may have interrupted it.
        os.write(2, f"\nacrlpd: {name}: saving after the current step, then ending; again: at once\n".encode())


def exit_code(number: int) -> int:
    """What a shell reports for a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number
