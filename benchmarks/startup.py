"""Measures what `acrlpd train` does from the command to its first update, by parts.

    python benchmarks/startup.py --config quickstart --exp_name startup --checkpoint_dir /tmp/startup

The arguments are those of `acrlpd train`, which is stopped after the first call of its train step. A part is a function
of the project or of JAX; its time is without that of the parts inside of it. Processor seconds are those of the process
itself, so those of environment processes are missing, which the seconds of the clock have. A second start in the same
directory needs --overwrite; JAX_COMPILATION_CACHE_DIR names an empty directory for a start with a cold cache.
"""

import time

_BEGIN = time.perf_counter()

import collections
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from acrlpd.cli import main, train
from acrlpd.training import demonstrations, drive, train_runs
from acrlpd.training.learner import Learner
from acrlpd.training.trainer import Trainer

# What is measured: where it is looked up, its name there, and the part that its time belongs to.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (train, "parse_config_args", "config"),
    (demonstrations, "collect_missing_demonstrations", "demonstrations and norm statistics"),
    (train, "check", "checks and plan"),
    (train_runs, "create_data_loader", "data"),
    (train_runs, "_create_protocol", "environments"),
    (Trainer, "initialize", "initial weights: tracing, compiling, computing"),
    (drive._Driver, "compile", "train step: tracing, lowering"),
    (jax.stages.Lowered, "compile", "train step: compiling, or reading from the cache"),
    (Learner, "update", "first call of the train step"),
)


class Stopwatch:
    """Adds up the times of parts; the time of a part inside of another part is not the other's."""

    def __init__(self) -> None:
        self.clock: collections.Counter[str] = collections.Counter()
        self.processor: collections.Counter[str] = collections.Counter()
        self._open = ["the rest"]
        self._last = time.perf_counter(), time.process_time()

    def switch(self) -> None:
        """The time since the last switch belongs to the innermost part."""
        clock, processor = time.perf_counter(), time.process_time()
        self.clock[self._open[-1]] += clock - self._last[0]
        self.processor[self._open[-1]] += processor - self._last[1]
        self._last = clock, processor

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._open.append(part)
            try:
                return jax.block_until_ready(function(*args, **kwargs))
            finally:
                self.switch()
                self._open.pop()

        return watched


def stop_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        raise KeyboardInterrupt

    return stopping


def measure(args: list[str]) -> None:
    imports = time.perf_counter() - _BEGIN, time.process_time()
    stopwatch = Stopwatch()
    for place, name, part in PARTS:
        setattr(place, name, stopwatch.timed(getattr(place, name), part))
    Learner.update = stop_after(Learner.update)  # type: ignore[method-assign]
    code = main.main(["train", *args])
    stopwatch.switch()
    if code != 130:
        sys.exit(f"the run ended with exit code {code} before its first update")
    rows = [("interpreter and imports", *imports)]
    rows += [(part, stopwatch.clock[part], stopwatch.processor[part]) for part in [*(p for *_, p in PARTS), "the rest"]]
    rows.append(("in all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    print(f"{'part':50s} {'clock s':>8s} {'processor s':>12s}")
    for part, clock, processor in rows:
        print(f"{part:50s} {clock:8.2f} {processor:12.2f}")


if __name__ == "__main__":
    measure(sys.argv[1:])
