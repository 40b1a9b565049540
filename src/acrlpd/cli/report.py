"""`acrlpd report`: a run, or several side by side, as a page and a summary."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from acrlpd.text import parse_arguments, print


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Write a run's report: one HTML file that needs no network, and a Markdown summary."""

    # Run directories: <checkpoints>/<config>/<exp_name>. Several are shown side by side; seeds of one config also have
    # their mean and its interval.
    runs: tyro.conf.Positional[tuple[Path, ...]]
    # The page; the summary goes beside it. Default: report.html in the first run's directory.
    output: Path | None = None


def main(args: Sequence[str]) -> int:
    options = parse_arguments(ReportOptions, args=args, prog="acrlpd report")
    from acrlpd.monitoring.report import generate_training_report

    page = generate_training_report(options.runs, options.output)
    print(f"{page}\n{page.with_suffix('.md')}")
    return 0
