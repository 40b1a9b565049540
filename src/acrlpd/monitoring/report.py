"""`generate_training_report`: one or more runs as a page and a Markdown summary."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from acrlpd.monitoring.report_markdown import create_summary
from acrlpd.monitoring.report_page import create_page
from acrlpd.runs.record import RunError, read_run

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
    made = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    page, summary = create_page(records, output, made), create_summary(records, output.name, made)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _write(output, page)
        _write(output.with_suffix(".md"), summary)
    except OSError as error:
        raise OSError(f"cannot write the report {output} ({error.strerror}); --output puts it elsewhere") from error
    return output


def _write(path: Path, text: str) -> None:
    """A reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
