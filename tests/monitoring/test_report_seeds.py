"""The report of several seeds: groups, means with their intervals, and the mean in the curves."""

import html
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from run_factory import make_run

from acrlpd.monitoring.report import generate_training_report
from acrlpd.monitoring.report_seeds import choose_colors, find_seed_groups
from acrlpd.runs.record import read_run

SMALL = {"film": False, "traces": False, "anomalies": False, "log_frequency": 250}
# Successes out of 50. By hand, with Student's 4.3027 (three seeds) and 12.706 (two): imitation is 20, 30 and 40 %, so
# 30 +- 4.3027 * 10 / sqrt(3); online RL is 88 and 84 %, so 86 +- 12.706 * 2.828 / sqrt(2), which ends at 100 %.
STAGES = (
    {"bc": 10, "offline": 30, "online": 44},
    {"bc": 15, "offline": 33, "online": 42},
    {"bc": 20, "offline": 36},
)
ROWS = [
    ["Imitation", "20.0 %", "30.0 %", "40.0 %", "30.0 %", "5.2 to 54.8 %"],
    ["Offline RL", "60.0 %", "66.0 %", "72.0 %", "66.0 %", "51.1 to 80.9 %"],
    ["Online RL", "88.0 %", "84.0 %", "–", "86.0 %", "60.6 to 100.0 %"],
]
RATES = ({500: 0.2, 1000: 0.4, 2500: 0.9}, {500: 0.3, 1000: 0.9, 2500: 1.0}, {500: 0.4, 1000: 0.8, 1500: 0.5})


def make_seeds(base: Path, name: str, **overrides: object) -> list[Path]:
    """Three seeds; the last one has reached neither the online phase nor the last evaluation."""
    return [
        make_run(base / f"{name}-seed{seed}", seed=seed, stages=stages, rates=rates, **SMALL, **overrides)
        for seed, (stages, rates) in enumerate(zip(STAGES, RATES, strict=True))
    ]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_seeds(tmp_path_factory.mktemp("seeds"), "first")


@pytest.fixture(scope="module")
def page(seeds: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_training_report(seeds, tmp_path_factory.mktemp("page") / "first-seeds.html")


def tables_of_seeds(page: str) -> dict[str, list[list[str]]]:
    """The tables over seeds by their headings, as a reader sees the cells; cells of bars are empty and left out."""
    section = re.search(r'<section id="seeds">(.*?)</section>', page, re.DOTALL)
    return read_tables(section[1]) if section else {}


def read_tables(markup: str) -> dict[str, list[list[str]]]:
    found = {}
    for heading, body in re.findall(
        r"<h[23]>([^\n]*?)</h[23]>(?:(?!<h[23]>).)*?<tbody>(.*?)</tbody>", markup, re.DOTALL
    ):
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in body.split("</tr>")[:-1]]
        texts = [[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in row] for row in cells]
        found[html.unescape(heading)] = [[text for text in row if text] for row in texts]
    return found


def charts_of(page: Path) -> dict[str, dict]:
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    charts = {chart["title"]: chart for group in data["curves"]["groups"] for chart in group["charts"]}
    for line in (line for chart in charts.values() for line in chart["means"]):
        line["x"] = data["curves"]["steps"][line["x"]]
    return charts


def test_means_and_intervals_over_seeds(page: Path) -> None:
    text = page.read_text()
    assert tables_of_seeds(text) == {"quickstart/first, seeds 0, 1, 2": ROWS}
    assert "the 95 % interval of the mean over seeds (Student&#39;s t), not the interval of one seed&#39;s" in text
    summary = page.with_suffix(".md").read_text()
    assert (
        "## quickstart/first, seeds 0, 1, 2\n\nEach seed counts once. The interval is the 95 % interval of" in summary
    )
    assert all(f"| {' | '.join(row)} |\n" in summary for row in ROWS)


def test_the_mean_is_drawn_where_all_seeds_have_a_value(page: Path) -> None:
    charts = charts_of(page)
    (mean,) = charts["Success rate"]["means"]
    assert (mean["x"], mean["runs"], mean["group"]) == ([500, 1000], [0, 1, 2], "quickstart/first")
    assert mean["y"] == pytest.approx([0.3, 0.7])
    # 0.7 +- 4.3027 * 0.26458 / sqrt(3) is more than a rate can be.
    assert mean["low"] == pytest.approx([0.05159, 0.04276], abs=2e-5)
    assert mean["high"] == pytest.approx([0.54841, 1.0], abs=2e-5)
    assert "mean over seeds" in charts["Success rate"]["note"] and charts["Total loss"]["means"] == []


def test_a_group_for_every_task(seeds: list[Path], tmp_path: Path) -> None:
    other = make_seeds(tmp_path, "first-b", **{"env.id": "cube-double-play-singletask-v0"})
    alone = make_run(tmp_path / "alone", batch_size=32, **SMALL)
    mixed = [seeds[0], other[0], seeds[1], alone, other[1], seeds[2], other[2]]
    page = generate_training_report(mixed, tmp_path / "page.html")
    titles = ["quickstart/first, seeds 0, 1, 2", "quickstart/first-b, seeds 0, 1, 2"]
    assert tables_of_seeds(page.read_text()) == dict.fromkeys(titles, ROWS)
    assert [line["runs"] for line in charts_of(page)["Success rate"]["means"]] == [[0, 2, 5], [1, 4, 6]]
    assert choose_colors(7, find_seed_groups([read_run(run) for run in mixed])) == [0, 1, 0, 2, 1, 0, 1]


def test_one_seed_is_reported_as_ever(seeds: list[Path], tmp_path: Path) -> None:
    page = generate_training_report(seeds[:1], tmp_path / "page.html")
    assert 'id="seeds"' not in page.read_text() and "#seeds" not in page.read_text()
    assert "over seeds" not in page.read_text() + page.with_suffix(".md").read_text()
    assert all(chart["means"] == [] for chart in charts_of(page).values())
    # The same seed twice says nothing of other seeds.
    twice = generate_training_report([seeds[0], seeds[0]], tmp_path / "twice.html")
    assert tables_of_seeds(twice.read_text()) == {}


def test_a_seed_that_is_given_twice_counts_once(seeds: list[Path], tmp_path: Path) -> None:
    again = make_run(tmp_path / "again", seed=1, stages={"bc": 50}, **SMALL)
    page = generate_training_report([*seeds, again], tmp_path / "page.html")
    assert tables_of_seeds(page.read_text()) == {"quickstart/first, seeds 0, 1, 2": ROWS}
    words = "quickstart/again is left out: an earlier run has the same seed."
    shown = MarkdownIt("commonmark").enable("table").render(page.with_suffix(".md").read_text())
    assert words in page.read_text() and f"<p>{words}</p>" in shown


def test_seeds_that_are_under_way(tmp_path: Path) -> None:
    """Two seeds with an evaluation and no stage yet, one without an evaluation: nothing is averaged over all three."""
    runs = [make_run(tmp_path / f"run-seed{s}", seed=s, stages={}, finished=False, **SMALL) for s in (3, 7)]
    for run, rate in zip(runs, (0.2, 0.4), strict=True):
        path = run / "evaluations" / "250" / "evaluation.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"success_rate": rate, "episodes": 50, "interval": [0.1, 0.5]}))
    title = "quickstart/run, seeds 3, 7"
    page = generate_training_report(runs, tmp_path / "two.html")
    assert tables_of_seeds(page.read_text()) == {title: [["Step 250", "20.0 %", "40.0 %", "30.0 %", "0.0 to 100.0 %"]]}
    runs.append(make_run(tmp_path / "run-seed9", seed=9, stages={}, rates={}, finished=False, **SMALL))
    page = generate_training_report(runs, tmp_path / "three.html")
    (row,) = tables_of_seeds(page.read_text())["quickstart/run, seeds 3, 7, 9"]
    assert row == ["Step 250", "20.0 %", "40.0 %", "–", "30.0 %", "0.0 to 100.0 %"]
    assert charts_of(page)["Success rate"]["means"] == []
    runs.append(make_run(tmp_path / "run-seed11", seed=11, stages={}, rates={}, finished=False, **SMALL))
    page = generate_training_report(runs[2:], tmp_path / "blind.html")
    assert "No seed has been evaluated yet." in page.read_text()
    assert "## quickstart/run, seeds 9, 11\n\nNo seed has been evaluated yet.\n" in page.with_suffix(".md").read_text()


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    nasty = "<b onclick=x>&| ![i](x) *e*"
    page = generate_training_report(make_seeds(tmp_path, nasty), tmp_path / "page.html")
    title = f"quickstart/{nasty}, seeds 0, 1, 2"
    assert tables_of_seeds(page.read_text()) == {title: ROWS}
    assert "<b onclick" not in page.read_text()
    shown = MarkdownIt("commonmark").enable("table").render(page.with_suffix(".md").read_text())
    assert read_tables(shown)[title] == ROWS and "<b onclick" not in shown and "<img" not in shown


def test_the_quick_start_benchmark_prints_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_seeds(tmp_path / "checkpoints" / "quickstart", "quickstart")
    script = str(Path(__file__).parents[2] / "benchmarks" / "quickstart.py")
    arguments = ["--report_only", "--directory", str(tmp_path), "--seeds"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, "0", "1", "2"])
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    assert "| policy | seed 0 | seed 1 | seed 2 | mean | 95 % of the mean |\n|---|---|---|---|---|---|\n" in printed
    assert "| Imitation (`bc`) | 20% | 30% | 40% | **30%** | 5% to 55% |\n" in printed
    assert "| Online RL (`online`) | 88% | 84% |  | **86%** | 61% to 100% |\n" in printed
    monkeypatch.setattr(sys, "argv", [script, *arguments, "1"])
    runpy.run_path(script, run_name="__main__")
    assert "| Imitation (`bc`) | 30% | **30%** |  |\n" in capsys.readouterr().out
