"""`generate_training_report`: one or more runs as a page and a Markdown summary.

Facts are computed in Python (`report_facts`, `report_verdict`, `report_validation`, `report_training`, `report_seeds`,
`report_curves`); the templates hold everything that is markup. The page is one file: styles, script and data are
inside, and nothing is fetched.
"""

import datetime
import itertools
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from acrlpd.files import write_text_atomically
from acrlpd.monitoring import report_facts as facts
from acrlpd.monitoring.report_curves import create_curves
from acrlpd.monitoring.report_seeds import SEEDS_NOTE, choose_colors, compare_seeds, find_seed_groups
from acrlpd.runs.directory import RunError
from acrlpd.runs.record import RunRecord, read_run
from acrlpd.text import escape_markdown
from acrlpd.units import format_bytes, format_interval, format_percent, format_seconds

PAGE_FILE = "report.html"


def generate_training_report(run_directories: Sequence[Path], output: Path | None = None) -> Path:
    """Writes `output`, and the summary beside it with the ending .md; returns the page's path.

    The default is report.html in the first run's directory. A run that is under way is reported as it is.
    """
    if not run_directories:
        raise RunError("nothing to report on: give a run directory, <checkpoints>/<config>/<exp_name>")
    records = [read_run(Path(directory)) for directory in run_directories]
    output = (output or records[0].directory / PAGE_FILE).expanduser().absolute()
    if output.suffix != ".html":
        raise RunError(f"the report is a page: give a file that ends in .html; found {output.name}")
    page, summary = render_report(records, output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(output, page)
        write_text_atomically(output.with_suffix(".md"), summary)
    except OSError as error:
        raise OSError(f"cannot write the report {output} ({error.strerror}); --output puts it elsewhere") from error
    return output


def render_report(records: Sequence[RunRecord], output: Path) -> tuple[str, str]:
    """The page and the Markdown summary; `output` is where the page will lie."""
    groups = find_seed_groups(records)
    colors = choose_colors(len(records), groups)
    runs = [
        facts.collect_facts(record, output) | {"color": color} for record, color in zip(records, colors, strict=True)
    ]
    outcomes = [{stage.label: stage.outcome for stage in run["stages"]} for run in runs]
    curves = create_curves(records, groups)
    context = {
        "runs": runs,
        "seed_groups": [(group, compare_seeds(group, outcomes)) for group in groups],
        "seeds_note": SEEDS_NOTE,
        "overviews": facts.side_by_side([run["overview"] for run in runs]),
        "outcomes": facts.side_by_side(outcomes),
        "differences": facts.config_differences(records),
        "constants": curves.pop("constants"),
        "data": {
            "runs": [_run_data(record) | {"color": color} for record, color in zip(records, colors, strict=True)],
            "curves": curves,
            "chunks": [plot for run in runs if run["validation"] for plot in run["validation"]["plots"]],
            "episodes": [episode["data"] for run in runs if run["critic"] for episode in run["critic"]["episodes"]],
        },
        "page_name": output.name,
        "made": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "version": version("acrlpd"),
    }
    page = _create_environment().get_template("report.html").render(context)
    summary = _create_environment(_finalize_markdown).get_template("report.md").render(context)
    return page, summary


def _finalize_markdown(value: Any) -> Any:
    """Escapes everything that the template of the summary inserts, unless the template calls it `safe`."""
    return value if isinstance(value, Markup) else escape_markdown(str(value))


def _create_environment(finalize: Callable[[Any], Any] | None = None) -> jinja2.Environment:
    """What is inserted is escaped by default, in both forms; a name that a template misspells is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("acrlpd.monitoring"),
        autoescape=jinja2.select_autoescape(["html"]),
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "count": lambda number: f"{number:,.0f}",
        "interval": format_interval,
        "percent": format_percent,
        "seconds": format_seconds,
        "steps": facts.describe_steps,
        "time": lambda seconds: datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M"),
        "value": lambda value: facts.UNKNOWN if value is None else str(value),
        "words": lambda name: name.replace("_", " "),
    }
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _run_data(record: RunRecord) -> dict[str, Any]:
    """What the page's script draws into every chart of a run."""
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
