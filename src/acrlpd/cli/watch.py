"""`acrlpd watch`: a run in the terminal while it trains."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import tyro

from acrlpd.config.command_line import Flag
from acrlpd.text import parse_arguments


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Follow a run in the terminal. Ctrl-C ends the view, not the run."""

    # A run directory: <checkpoints>/<config>/<exp_name>. The directory may still be empty.
    run: tyro.conf.Positional[Path]
    # Print one frame and end. Without a terminal, `watch` always does this.
    once: Flag = False
    # Seconds between two looks.
    interval: float = 2.0


def main(args: Sequence[str]) -> int:
    options = parse_arguments(WatchOptions, args=args, prog="acrlpd watch")
    if not 0 < options.interval < math.inf:
        raise ValueError(f"--interval must be above 0 seconds; found {options.interval}")
    from acrlpd.monitoring.watch import watch

    return watch(options.run, once=options.once, interval_s=options.interval)
