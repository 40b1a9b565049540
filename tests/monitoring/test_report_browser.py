"""The report in a real browser: charts are drawn, nothing complains, zooming and the rest work."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_factory import make_run

from acrlpd.monitoring.report import generate_training_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

# Drags over the middle of the first chart, then reads the page as a user would.
INTERACTION = """
<script>
window.addEventListener("load", () => {
  const say = (name, value) => { document.body.dataset[name] = value; };
  const chart = document.querySelector("#curves svg.chart");
  const path = () => document.querySelector("#curves svg.chart .line").getAttribute("d");
  const box = chart.getBoundingClientRect();
  const send = (type, share) => chart.dispatchEvent(new PointerEvent(type, {
    clientX: box.left + share * box.width, clientY: box.top + 40, button: 0, pointerId: 1, bubbles: true,
  }));
  chart.setPointerCapture = () => {};
  const whole = path();
  send("pointermove", 0.5);
  say("readout", document.querySelector(".tooltip").textContent);
  send("pointerdown", 0.4); send("pointermove", 0.7); send("pointerup", 0.7);
  say("zoomed", path() !== whole);
  say("range", document.getElementById("reset-zoom").textContent);
  chart.dispatchEvent(new MouseEvent("dblclick"));
  say("restored", path() === whole);
  const slider = document.getElementById("smoothing");
  const before = document.querySelectorAll("#curves .raw").length;
  slider.value = before ? 0 : 0.9;
  slider.dispatchEvent(new Event("input"));
  say("smoothing", document.querySelectorAll("#curves .raw").length !== before);
  const ground = () => getComputedStyle(document.body).backgroundColor;
  const light = ground();
  document.getElementById("theme").click();
  say("themes", light !== ground());
});
</script>
"""


def open_page(path: Path, profile: Path) -> tuple[str, str]:
    """The document after its scripts ran, and what the browser had to say."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,900",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
        path.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    console = "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)
    return result.stdout, console


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("runs")
    return make_run(base / "one"), make_run(base / "two", film=False, anomalies=False, seed=1)


def test_charts_are_drawn_and_can_be_used(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = generate_training_report([runs[0]], tmp_path / "page.html")
    page.write_text(page.read_text().replace("</body>", INTERACTION + "</body>"))
    document, console = open_page(page, tmp_path / "profile")
    assert console == ""
    attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", document)[0]))
    assert attributes.pop("readout").startswith("step 1,")
    assert re.fullmatch(r"steps \d+ to \d+: show all", attributes.pop("range"))
    assert attributes == dict.fromkeys(("ready", "zoomed", "restored", "smoothing", "themes"), "true")
    charts = re.findall(r'<svg class="chart".*?</svg>', document, re.DOTALL)
    assert len(charts) > 25 and all('class="line' in chart for chart in charts)
    strips = [chart for chart in charts if "data:image/jpeg" in chart]
    assert len(strips) == 2 and all('class="band' in chart and 'class="area' in chart for chart in strips)
    assert 'class="span error"' in charts[-1] and 'class="boundary"' in charts[-1]


def test_several_runs_are_overlaid(runs: tuple[Path, Path], tmp_path: Path) -> None:
    document, console = open_page(generate_training_report(runs, tmp_path / "page.html"), tmp_path / "profile")
    assert console == "" and 'data-ready="true"' in document
    loss = re.search(r'<svg class="chart" role="img" aria-label="Total loss".*?</svg>', document, re.DOTALL)[0]
    assert 'class="line c0' in loss and 'class="line c1' in loss


def test_two_seeds_have_a_mean_with_a_band(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The two runs differ in nothing but their seed."""
    document, console = open_page(generate_training_report(runs, tmp_path / "page.html"), tmp_path / "profile")
    assert console == ""
    rate = re.search(r'<svg class="chart" role="img" aria-label="Success rate".*?</svg>', document, re.DOTALL)[0]
    assert re.findall(r'class="line (c\d) *(\w+)"', rate) == [("c0", "thin"), ("c1", "thin"), ("c9", "mean")]
    assert rate.count('class="band c9"') == 1 and 'class="interval' not in rate
