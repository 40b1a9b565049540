"""Measures what `acrlpd train` does from the command to its first update, by parts.

    python benchmarks/startup.py --config quickstart --exp_name startup --checkpoint_dir /tmp/startup

The arguments are those of `acrlpd train`, which is stopped after the first call of its train step. A part is a function
of the project or of JAX; its time is without that of the parts inside of it. Processor seconds are those of the process
itself; those of the environments' processes stand in a line of their own. A second start in the same directory needs
--overwrite; JAX_COMPILATION_CACHE_DIR names an empty directory for a start with a cold cache.
"""

import collections
import functools
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

BEGIN = time.perf_counter()


class Stopwatch:
    """Adds up the times of parts, on the clock and of the processor."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        self._open = ["the rest"]
        self._last = time.perf_counter(), time.process_time()

    def switch(self) -> None:
        """The time since the last switch belongs to the innermost part."""
        now = time.perf_counter(), time.process_time()
        for i in (0, 1):
            self.times[self._open[-1]][i] += now[i] - self._last[i]
        self._last = now

    def watch(self, place: Any, name: str, part: str) -> None:
        """Counts the calls of a function, which is looked up in `place`, as `part`."""
        import jax

        function = getattr(place, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._open.append(part)
            try:
                return jax.block_until_ready(function(*args, **kwargs))
            finally:
                self.switch()
                self._open.pop()

        setattr(place, name, watched)


def stop_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        raise KeyboardInterrupt

    return stopping


def measure(args: list[str]) -> None:
    # Imported here, because the processes of environments import this file too and do not need JAX.
    import jax

    from acrlpd.cli import main, train
    from acrlpd.training import demonstrations, drive, experiment, train_runs  # noqa: F401  # `train` imports it later
    from acrlpd.training.learner import Learner
    from acrlpd.training.trainer import Trainer

    stopwatch = Stopwatch()
    stopwatch.times["interpreter and imports"] = [time.perf_counter() - BEGIN, time.process_time()]
    stopwatch.watch(train, "parse_config_args", "config")
    stopwatch.watch(demonstrations, "collect_missing_demonstrations", "demonstrations and norm statistics")
    stopwatch.watch(train, "check", "checks and plan")
    stopwatch.watch(train_runs, "create_data_loader", "data")
    stopwatch.watch(train_runs, "_create_protocol", "waiting for the environments")
    stopwatch.watch(Trainer, "initialize", "initial weights: tracing, compiling, computing")
    stopwatch.watch(drive._Driver, "compile", "train step: tracing, lowering")
    stopwatch.watch(jax.stages.Lowered, "compile", "train step: compiling, or reading from the cache")
    stopwatch.watch(Learner, "update", "first call of the train step")
    Learner.update = stop_after(Learner.update)  # type: ignore[method-assign]
    code = main.main(["train", *args])
    stopwatch.switch()
    if code != 130:
        sys.exit(f"the run ended with exit code {code} before its first update")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_all = [sum(times) for times in zip(*stopwatch.times.values(), strict=True)]
    print(f"{'part':50s} {'clock s':>8s} {'processor s':>12s}")
    for part, (clock, processor) in [*stopwatch.times.items(), ("in all", in_all)]:
        print(f"{part:50s} {clock:8.2f} {processor:12.2f}")
    print(f"{'processes of the environments':50s} {'':8s} {children.ru_utime + children.ru_stime:12.2f}")


if __name__ == "__main__":
    measure(sys.argv[1:])
