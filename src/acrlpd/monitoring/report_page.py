"""The report as one HTML file: styles, script and data inside, nothing to fetch."""

import itertools
import json
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from acrlpd.monitoring import report_sections as sections
from acrlpd.monitoring.report_curves import create_curves
from acrlpd.runs.record import RunRecord

_NAVIGATION = {
    "verdict": "Verdict",
    "runs": "Runs",
    "evaluation": "Evaluation",
    "episodes": "Episodes",
    "learning": "Curves",
    "anomalies": "Time line",
    "cost": "Memory and time",
    "checkpoints": "Checkpoints",
    "config": "Config",
}


def create_page(records: Sequence[RunRecord], output: Path, made: str) -> str:
    """The whole document; `output` is where it will lie, `made` when it was made."""
    curves = create_curves(records)
    episodes, episode_data = sections.episodes(records, output)
    body = "".join(
        [
            sections.header(records),
            sections.verdicts(records),
            sections.side_by_side(records),
            sections.evaluation(records),
            episodes,
            sections.curves(records, curves["constants"]),
            sections.anomalies(records),
            sections.cost(records),
            sections.checkpoints(records),
            sections.configs(records),
        ]
    )
    data = {"runs": [_run_data(record) for record in records], "curves": curves, "episodes": episode_data}
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in _NAVIGATION.items() if f'id="{name}"' in body)
    title = escape(", ".join(record.name for record in records))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}: acrlpd report</title>\n<style>\n{_resource('report.css')}</style>\n</head>\n<body>\n"
        f'<header class="topbar"><div class="bar-inner"><div class="brand">acrlpd <span>report</span></div>'
        f'<nav>{links}</nav><button id="theme" title="light or dark">◐</button></div></header>\n'
        f"<main>{body}</main>\n<footer>Made {escape(made)} by acrlpd {version('acrlpd')}.</footer>\n"
        f'<script type="application/json" id="report-data">{_embeddable(data)}</script>\n'
        f"<script>\n{_resource('report_chart.js')}</script>\n<script>\n{_resource('report.js')}</script>\n</body>\n</html>\n"
    )


def _run_data(record: RunRecord) -> dict[str, Any]:
    last = record.last_step
    return {
        "name": record.name,
        "last_step": last,
        "anomalies": [
            {"first": a.step, "last": last if a.last_step is None else a.last_step, "severity": a.severity}
            for a in record.anomalies
        ],
        "boundaries": [
            {"step": before.last_step, "name": phase.name} for before, phase in itertools.pairwise(record.phases)
        ],
    }


def _embeddable(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return (files("acrlpd.monitoring") / name).read_text(encoding="utf-8")
