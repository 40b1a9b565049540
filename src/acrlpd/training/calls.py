"""How many updates the next call of the train step makes."""

import time

# Updates that take about so many seconds are handed to the devices at once. Two such calls are under way, and a signal
# has to wait for them.
CALL_S = 0.25


class CallLengths:
    """Chooses the length of each call from the time that updates take; the lengths do not change what is computed."""

    def __init__(self, most: int, *, is_timed: bool) -> None:
        """`most` is the largest length. Several processes need equal lengths, so their calls are not timed."""
        self.most = most
        self._is_timed = is_timed
        self._update_s: float | None = None
        self._last_end: float | None = None

    def next(self, step: int, *stops: int) -> int:
        """The updates of the call that begins after `step`. The call ends at the first of the later `stops`."""
        lengths = [stop - step for stop in stops if stop > step]
        if self._is_timed:
            lengths.append(1 if self._update_s is None else int(CALL_S / self._update_s))
        return max(1, min(self.most, *lengths))

    def end(self, num_updates: int) -> None:
        """The devices have finished a call. The time since the end of the call before is the time of its updates."""
        now = time.perf_counter()
        if self._last_end is not None:
            update_s = (now - self._last_end) / num_updates
            # The time may contain a save or an evaluation. A longer time is therefore believed little by little.
            self._update_s = update_s if self._update_s is None else min(update_s, 1.5 * self._update_s)
        self._last_end = now


def next_multiple(step: int, frequency: int) -> int:
    """The first multiple of `frequency` after `step`."""
    return (step // frequency + 1) * frequency
