"""The report as files: one page that needs nothing else, a Markdown summary, and clear words for wrong input."""

import html
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from run_factory import make_run

from acrlpd.cli.main import main
from acrlpd.monitoring.report import generate_training_report

VOID = {"meta", "link", "input", "br", "img"}


class Page(html.parser.HTMLParser):
    """Checks that every element is closed in order; collects ids, references and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.data = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [found["id"]] if found.get("id") else []
        self.references += [found[name] for name in ("href", "src", "data", "action") if found.get(name)]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = self.data or data
        elif self.open and self.open[-1] != "style":
            self.text += data + " "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("runs")
    second = make_run(base / "second", stages={"bc": 20, "offline": 26}, film=False, seed=1, batch_size=32)
    return make_run(base / "first"), second


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path]) -> Page:
    return Page(generate_training_report([runs[0]]).read_text())


def test_the_page_is_well_formed_and_needs_nothing_else(runs: tuple[Path, Path], page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    local = [reference for reference in page.references if reference.startswith(("#", "data:"))]
    assert local == page.references
    assert all(reference[1:] in page.ids for reference in local if reference.startswith("#"))
    text = (runs[0] / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_the_page_has_the_numbers_of_the_run(page: Page) -> None:
    for words in (
        "quickstart/first",
        "RL beat imitation by 44 points: 88 % against 44 %",
        "Imitation of the successes only",
        "54.0 %",
        "76 to 94 %",
        "Q is -134 on average; rewards and discount allow -100 to 0",
        "lower the critic's learning rate",
        "2.79 GiB",
        "Where the time of the run's last process went",
        "training.log_frequency",
        "correlate 0.83",
        "best evaluation",
        "sampling",
    ):
        assert words in page.text, words
    sections = ("verdict", "evaluation", "episodes", "learning", "anomalies", "cost", "checkpoints", "config")
    assert set(sections) <= set(page.ids)


def test_the_data_of_the_page(page: Page) -> None:
    data = json.loads(page.data)
    assert data["runs"][0]["boundaries"] == [{"step": 1500, "name": "online"}]
    assert [span["severity"] for span in data["runs"][0]["anomalies"]] == ["error", "warning", "warning"]
    success, failure = data["episodes"]
    assert success["strip"]["source"].startswith("data:image/jpeg;base64,") and success["strip"]["width"] == 12 * 128
    assert len(success["advantage"]) == len(success["q"]) == len(success["chunk_steps"])
    assert success["returns"] is not None and failure["returns"] is None


def test_the_markdown_summary_has_the_table(runs: tuple[Path, Path], page: Page) -> None:
    text = (runs[0] / "report.md").read_text()
    assert "**RL beat imitation by 44 points: 88 % against 44 %**" in text
    assert "| Online RL | 88.0 % | 76 to 94 % | 50 |" in text
    assert "| time of an update | 100 ms |" in text and "[report.html](report.html)" in text


def test_episodes_lost_to_crashes_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "crashes", film=False)
    summary = json.loads((run / "summary.json").read_text())
    summary["evaluation"]["online"] |= {"episodes": 47.0, "lost_episodes": 3.0}
    (run / "summary.json").write_text(json.dumps(summary))
    with (run / "metrics.jsonl").open("a") as file:
        for lost in (0, 2):
            file.write(json.dumps({"step": 2500, "online/lost_episodes": lost}) + "\n")
    page = Page(generate_training_report([run]).read_text())
    assert "47 (3 lost)" in page.text and "50 (" not in page.text
    assert "| 47 (3 lost) |" in (run / "report.md").read_text()
    titles = [chart["title"] for group in json.loads(page.data)["curves"]["groups"] for chart in group["charts"]]
    assert "Lost episodes of a round" in titles


def test_runs_side_by_side(runs: tuple[Path, Path], tmp_path: Path) -> None:
    output = generate_training_report(runs, tmp_path / "new" / "both.html")
    both = Page(output.read_text())
    assert "2 runs side by side" in both.text and "batch_size" in both.text
    data = json.loads(both.data)
    loss = next(c for g in data["curves"]["groups"] for c in g["charts"] if c["title"] == "Total loss")
    assert [line["run"] for line in loss["lines"]] == [0, 1]
    summary = output.with_suffix(".md").read_text()
    assert "| success: Offline RL | 66.0 % | 52.0 % |" in summary and "| batch_size | 64 | 32 |" in summary


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", offline_steps=80_000, online_steps=20_000, log_frequency=10)
    assert generate_training_report([run]).stat().st_size < 10e6 / 4


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script><b>&"
    run = make_run(tmp_path / nasty.replace("/", "|"), anomalies=False, **{"data.default_prompt": nasty})
    path = run / "evaluations" / "2500" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["traces"][0]["task"] = nasty
    path.write_text(json.dumps(evaluation))
    entry = {"kind": nasty, "step": 3, "last_step": None, "severity": nasty, "message": nasty, "advice": nasty}
    (run / "anomalies.jsonl").write_text(json.dumps(entry) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2500, nasty: 1.0}) + "\n" + json.dumps({"step": 2501, nasty: 2.0}) + "\n")
    page = Page(generate_training_report([run]).read_text())
    titles = [chart["title"] for group in json.loads(page.data)["curves"]["groups"] for chart in group["charts"]]
    assert page.text.count(nasty) > 3 and nasty in titles
    assert (
        f"quickstart/{run.name}" in page.text and json.loads(page.data)["runs"][0]["name"] == f"quickstart/{run.name}"
    )


def test_hostile_text_stays_text_in_the_summary(tmp_path: Path) -> None:
    """Names, messages and values of others as Markdown: no tag, no image, no further column, no link."""
    nasty = "<b onclick=x>| ![i](http://x) `c` *e*\n# head \x1b[2J"
    run = make_run(tmp_path / nasty.replace("/", ""), anomalies=False, **{"data.default_prompt": nasty})
    entry = {"kind": nasty, "step": 3, "last_step": None, "severity": nasty, "message": nasty, "advice": nasty}
    (run / "anomalies.jsonl").write_text(json.dumps(entry) + "\n")
    summary = json.loads((run / "summary.json").read_text()) | {"status": f"stopped: {nasty}"}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "profile.json").write_text(json.dumps({"steps": [1, 2], "parts": {nasty: 1.0}, "trace": nasty}))
    text = generate_training_report([run, run], tmp_path / "both (1).html").with_suffix(".md").read_text()
    shown = MarkdownIt("commonmark").enable("table").render(text)
    tags = set(re.findall(r"<([a-z0-9]+)", shown))
    assert tags <= {"h1", "h2", "h3", "p", "strong", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "a"}
    assert re.findall(r'href="([^"]*)"', shown) == ["both%20%281%29.html"]
    plain = " ".join(nasty.split()).replace("\x1b", "\\x1b")
    assert shown.count(html.escape(plain)) >= 9
    columns = {row.count("<td") for row in re.findall(r"<tr>.*?</tr>", shown, re.DOTALL)}
    assert columns <= {0, 2, 3, 4, 5}


def test_what_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    run = make_run(tmp_path / "diverged")
    path = run / "evaluations" / "2500" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["traces"][0]["values"]["q"][1] = float("nan")
    evaluation["calibration"]["bins"][0]["predicted"] = float("nan")
    path.write_text(json.dumps(evaluation))
    page = generate_training_report([run])
    episode = json.loads(Page(page.read_text()).data)["episodes"][0]
    assert episode["q"][1] is None and episode["advantage"][1] is None and episode["q"][2] is not None
    plot = re.search(r'<svg class="calibration".*?</svg>', page.read_text(), re.DOTALL)
    assert plot is not None and plot[0].count("<circle") == 4 and "nan" not in plot[0]


def test_a_record_of_another_version_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "other", film=False)
    path = run / "evaluations" / "2500" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    del evaluation["calibration"]["bias"], evaluation["traces"][0]["rewards"]
    path.write_text(json.dumps(evaluation))
    summary = json.loads((run / "summary.json").read_text())
    del summary["best_evaluation"]["score"]
    (run / "summary.json").write_text(json.dumps(summary))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2500, "reward_max": Infinity}\n')
    page = Page(generate_training_report([run]).read_text())
    assert [episode["seed"] for episode in json.loads(page.data)["episodes"]] == [10_001]
    assert "ranks a success above a failure" in page.text and "on average and correlate" not in page.text


def test_films_of_one_run_do_not_change_the_others(tmp_path: Path) -> None:
    """Without film strips episodes stand in pairs, also beside a run that has some."""
    filmed, plain = make_run(tmp_path / "filmed"), make_run(tmp_path / "plain", film=False)
    html = generate_training_report([filmed, plain], tmp_path / "both.html").read_text()
    assert re.findall(r'<div class="(episodes[a-z ]*)">', html) == ["episodes", "episodes paired"]


def test_half_a_run_is_reported_as_far_as_it_got(tmp_path: Path) -> None:
    run = make_run(tmp_path / "cut", finished=False, anomalies=False, stages={})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 2600, "total_lo')  # a kill in the middle of a line
    text = Page(generate_training_report([run]).read_text()).text
    assert "under way or was cut off: the last line of metrics is of step 2,500" in text
    assert "1 lines are not JSON objects with a step" in text


def make_checkpoint(run: Path) -> Path:
    (run / "2500" / "run").mkdir()
    (run / "2500" / "run" / "run.json").touch()
    return run / "2500"


def break_summary(run: Path) -> Path:
    (run / "summary.json").write_text('{"status": "fini')
    return run


def break_config(run: Path) -> Path:
    (run / "config.yaml").write_text("name: [")
    return run


def remove_metrics(run: Path) -> Path:
    (run / "metrics.jsonl").unlink()
    return run


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: run / "nothing", "no such directory"),
        (lambda run: run / "config.yaml", "is a file; expected a run directory"),
        (lambda run: run.parent, "it has no config.yaml; there are runs below it: "),
        (lambda run: run / "evaluations", "it has no config.yaml"),
        (make_checkpoint, "2500 is a checkpoint; give its run: "),
        (break_summary, "summary.json is damaged: "),
        (break_config, "config.yaml cannot be read: "),
        (remove_metrics, "has no metrics yet"),
    ],
)
def test_wrong_input_gets_one_message_and_exit_code_2(spoil, message, tmp_path, capsys) -> None:
    path = spoil(make_run(tmp_path / "runs" / "one", traces=False))
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("acrlpd: ") and "Traceback" not in error


def test_what_cannot_be_written_is_refused(runs: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    assert main(["report", str(runs[0]), "--output", str(tmp_path / "report.pdf")]) == 2
    assert "ends in .html" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "nothing to report on" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["report", str(runs[0]), "--output", str(tmp_path / "file" / "page.html")]) == 2
    error = capsys.readouterr().err
    assert f"cannot write the report {tmp_path / 'file' / 'page.html'} (" in error and "--output puts it" in error


def test_the_command_needs_no_device(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """JAX_PLATFORMS names a platform that does not exist: a command that touched a device would fail."""
    output = tmp_path / "page.html"
    command = [sys.executable, "-m", "acrlpd.cli.main", "report", str(runs[0]), "--output", str(output)]
    environment = os.environ | {"JAX_PLATFORMS": "none_at_all"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == [str(output), str(output.with_suffix(".md"))]
