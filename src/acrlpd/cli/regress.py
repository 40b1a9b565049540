"""The commands of `acrlpd regress`: typed functions whose signatures become the command line."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Column, Table
from rich.text import Text

from acrlpd.cli.data import JsonFlag
from acrlpd.config.command_line import Flag
from acrlpd.console import Console
from acrlpd.text import print

if TYPE_CHECKING:
    from acrlpd.regression.compare import Row
    from acrlpd.regression.scenario import Scenario

Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SCENARIO")]
BASELINES = Path("benchmarks/regression")
# Columns of the table in a file, where lines may be long.
_WIDTH = 160
_STYLES = {"ok": "green", "better": "cyan", "REGRESSION": "bold red"}


def list_scenarios() -> None:
    """List the scenarios that acrlpd brings along."""
    from acrlpd.regression.scenario import find_scenario, shipped_names

    table = Table("scenario", "seeds", "updates", "what it watches", box=None)
    for scenario in map(find_scenario, shipped_names()):
        updates = f"{scenario.config.num_train_steps:,}"
        table.add_row(scenario.name, str(len(scenario.seeds)), updates, scenario.description)
    Console().print(table)


def record(scenarios: Names = (), /, *, baselines: Path = BASELINES, overwrite: Flag = False) -> int:
    """Train scenarios and keep what was measured as their baselines.

    Args:
        scenarios: Names of scenarios (`acrlpd regress list`) or paths of own YAML files. Default: all names.
        baselines: Directory of the baselines.
        overwrite: Replace a baseline that is there.
    """
    from acrlpd.regression.apart import measure_apart
    from acrlpd.regression.baseline import BaselineError, baseline_path, write_baseline

    chosen = _find(scenarios)
    paths = [baseline_path(baselines, scenario.name) for scenario in chosen]
    for path in paths:
        if path.exists() and not overwrite:
            raise BaselineError(f"{path} exists: `acrlpd regress check` compares with it, and --overwrite replaces it")
    for scenario, path in zip(chosen, paths, strict=True):
        _announce(scenario)
        write_baseline(path, measure_apart(scenario))
        print(f"recorded {path}")
    return 0


def check(scenarios: Names = (), /, *, baselines: Path = BASELINES, busy: Flag = False, json_: JsonFlag = False) -> int:
    """Train scenarios again and compare them with their baselines; exit code 1 if something has become worse.

    Args:
        scenarios: Names of scenarios (`acrlpd regress list`) or paths of own YAML files. Default: all that have a
            baseline.
        baselines: Directory of the baselines.
        busy: Other programs use this machine: wider bounds for processor time and host memory.
    """
    from acrlpd.regression.apart import measure_apart
    from acrlpd.regression.baseline import baseline_path, check_comparable, find_differences, read_baseline
    from acrlpd.regression.compare import compare

    chosen = _find(scenarios or _recorded_names(baselines))
    stored = [read_baseline(baseline_path(baselines, scenario.name)) for scenario in chosen]
    for scenario, baseline in zip(chosen, stored, strict=True):
        check_comparable(scenario, baseline)
    found: dict[str, list[Row]] = {}
    notes: dict[str, list[str]] = {}
    for scenario, baseline in zip(chosen, stored, strict=True):
        if not json_:
            _announce(scenario)
        now = measure_apart(scenario)
        found[scenario.name] = compare(baseline, now, is_busy=busy)
        notes[scenario.name] = [*find_differences(baseline, now), *now.problems]
        if not json_:
            _show(scenario.name, found[scenario.name], notes[scenario.name])
    worse = [f"{name}: {row.quantity}" for name, rows in found.items() for row in rows if row.verdict == "REGRESSION"]
    if json_:
        rows_of = {name: [vars(row) for row in rows] for name, rows in found.items()}
        print(json.dumps({"rows": rows_of, "notes": notes, "regressions": worse}, indent=2))
    elif worse:
        print(f"{len(worse)} regressions: {'; '.join(worse)}")
        print("If the change is intended, `acrlpd regress record --overwrite` makes new baselines.")
    else:
        print(f"no regression in {', '.join(found)}")
    return 1 if worse else 0


def _find(names: Sequence[str]) -> list["Scenario"]:
    from acrlpd.config import ConfigError
    from acrlpd.regression.scenario import find_scenario, shipped_names

    chosen = [find_scenario(name) for name in names or shipped_names()]
    if len({scenario.name for scenario in chosen}) < len(chosen):
        raise ConfigError("a scenario is named twice; two scenarios of one name would share a baseline")
    return chosen


def _recorded_names(baselines: Path) -> list[str]:
    """The shipped scenarios that have a baseline; the others are named, so that nobody believes them compared."""
    from acrlpd.regression.baseline import BaselineError, baseline_path
    from acrlpd.regression.scenario import shipped_names

    recorded = [name for name in shipped_names() if baseline_path(baselines, name).exists()]
    others = ", ".join(name for name in shipped_names() if name not in recorded)
    if not recorded:
        raise BaselineError(f"there is no baseline of {others} in {baselines}: `acrlpd regress record` makes them")
    if others:
        print(f"without a baseline in {baselines}, so not compared: {others}", file=sys.stderr)
    return recorded


def _announce(scenario: "Scenario") -> None:
    print(f"{scenario.name}: {len(scenario.seeds)} seeds, {scenario.config.num_train_steps:,} updates each")


def _show(name: str, rows: Sequence["Row"], notes: Sequence[str]) -> None:
    columns = (Column(title, no_wrap=True) for title in ("quantity", "baseline", "now", "allowed", "verdict"))
    table = Table("scenario", *columns, box=None, header_style="bold")
    for row in rows:
        verdict = Text(row.verdict, _STYLES[row.verdict])
        table.add_row(name, row.quantity, row.baseline, row.now, row.allowed, verdict)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)
    for note in notes:
        console.print(Text.assemble(("note", "yellow"), f" {note}"), soft_wrap=True)


COMMANDS = {"list": list_scenarios, "record": record, "check": check}
