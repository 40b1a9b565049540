"""How many updates the next call of the train step makes."""

import logging
import time

import jax

from acrlpd.config import RLTrainConfig

logger = logging.getLogger(__name__)

# The updates of one call take about a quarter of a second together. Two calls are under way at a time, and a signal has
# to wait for both.
CALL_S = 0.25
# By how much the time of an update may seem to change from one call to the next. The host may have been busy with other
# things: then one call seems to be very long, and the next call, which has long been finished, very short.
_MOST_GROWTH, _MOST_SHRINKING = 1.5, 0.5


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
            update_s = max((now - self._last_end) / num_updates, 1e-9)
            if self._update_s is not None:
                update_s = min(max(update_s, _MOST_SHRINKING * self._update_s), _MOST_GROWTH * self._update_s)
            self._update_s = update_s
        self._last_end = now

    def pause(self) -> None:
        """The devices have nothing to do until the next call, so the time until its end tells nothing about updates."""
        self._last_end = None


def next_multiple(step: int, frequency: int) -> int:
    """The first multiple of `frequency` after `step`."""
    return (step // frequency + 1) * frequency


def create_call_lengths(rl_config: RLTrainConfig, capacity: int, *, one_by_one: bool) -> CallLengths:
    """The calls of a run whose feeds serve at most `capacity` updates."""
    wanted, is_alone = rl_config.training.updates_per_call, jax.process_count() == 1
    if wanted is not None and wanted > capacity:
        logger.warning(
            "training.updates_per_call is %d, but a call of this run makes at most %d updates", wanted, capacity
        )
    most = min(capacity, wanted or (capacity if is_alone else 1))
    return CallLengths(1 if one_by_one else most, is_timed=is_alone and wanted is None)
