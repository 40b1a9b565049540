"""`acrlpd report` and `acrlpd watch`."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import tyro

from acrlpd.config.command_line import Flag


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Which runs, and where the report goes."""

    # Run directories: <checkpoints>/<config>/<exp_name>. Several are shown side by side.
    runs: tyro.conf.Positional[tuple[Path, ...]]
    # The page; the summary goes beside it. Default: report.html in the first run's directory.
    output: Path | None = None


def report_main(args: Sequence[str]) -> int:
    options = tyro.cli(
        ReportOptions,
        args=args,
        prog="acrlpd report",
        description="Write a run's report: one HTML file that needs no network, and a Markdown summary.",
    )
    from acrlpd.monitoring.report import generate_training_report

    page = generate_training_report(options.runs, options.output)
    print(f"{page}\n{page.with_suffix('.md')}")
    return 0


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Which run, and how often to look."""

    # A run directory: <checkpoints>/<config>/<exp_name>; it may still be empty.
    run: tyro.conf.Positional[Path]
    # Print what there is and end, as happens where the output is not a terminal.
    once: Flag = False
    # Seconds between two looks.
    interval: float = 2.0


def watch_main(args: Sequence[str]) -> int:
    options = tyro.cli(
        WatchOptions,
        args=args,
        prog="acrlpd watch",
        description="Follow a run in the terminal; Ctrl-C ends it.",
    )
    if not 0 < options.interval < math.inf:
        raise ValueError(f"--interval must be above 0 seconds; found {options.interval}")
    from acrlpd.monitoring.watch import watch

    return watch(options.run, once=options.once, interval_s=options.interval)
