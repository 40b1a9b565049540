"""Which injected faults `acrlpd regress check` finds, and how often it fires without a fault.

    python benchmarks/regress.py --repetitions 10

Records the scenario corridor, checks it with each fault and then without one, and prints a Markdown table. Faults come
from outside: a scenario file of the same name with another learning rate, or with an improvement of regress_faults.py.
An update of twice the time keeps a core busy for as long as an update of the recorded training takes.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import yaml

from acrlpd.regression.baseline import baseline_path, describe_origin, read_baseline
from acrlpd.regression.scenario import SHIPPED
from acrlpd.regression.update_cost import create_workload

HERE = pathlib.Path(__file__).parent
SCENARIO = "corridor"
FAULTS: dict[str, dict[str, Any]] = {
    "learning rates x 10": {
        "actor_lr_schedule": {"type": "constant", "peak_lr": 2e-2},
        "critic_lr_schedule": {"type": "constant", "peak_lr": 2e-2},
    },
    "learning rate of the critics x 10": {"critic_lr_schedule": {"type": "constant", "peak_lr": 2e-2}},
    "flipped sign of the advantage": {"improvement": "regress_faults:FlippedSign"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{describe_origin().machine}, {datetime.date.today()}, commit {commit or 'unknown'}\n")
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        original = yaml.safe_load((SHIPPED / f"{SCENARIO}.yaml").read_text())
        regress("record", write(directory / "clean", original, {}), directory)
        busy = {"type": "regress_faults:BusyHost", "busy_ms": update_ms(directory)}
        print(f"An update takes {busy['busy_ms']:.2f} ms of processor time.\n")
        print("| run | regressions |\n|---|---|")
        for name, changes in {**FAULTS, "an update of twice the time": {"improvement": busy}}.items():
            if args.only in name:
                report(name, write(directory / name.replace(" ", "_"), original, changes), directory)
        for i in range(args.repetitions):
            report(f"no fault, {i + 1}", directory / "clean" / f"{SCENARIO}.yaml", directory)


def write(directory: pathlib.Path, scenario: dict[str, Any], changes: dict[str, Any]) -> pathlib.Path:
    directory.mkdir()
    path = directory / f"{SCENARIO}.yaml"
    path.write_text(yaml.safe_dump({**scenario, "overrides": {**scenario["overrides"], **changes}}))
    return path


def update_ms(baselines: pathlib.Path) -> float:
    """Processor time of an update of the recorded training: its workloads, times the time of a workload now."""
    workload, times = create_workload(), []
    for _ in range(10):
        start = time.process_time()
        workload()
        times.append(time.process_time() - start)
    cost = statistics.median(read_baseline(baseline_path(baselines, SCENARIO)).update_cost)
    return 1_000 * cost * statistics.median(times)


def report(name: str, path: pathlib.Path, baselines: pathlib.Path) -> None:
    found = json.loads(regress("check", path, baselines, "--json"))["regressions"]
    print(f"| {name} | {', '.join(found) or 'none'} |", flush=True)


def regress(command: str, path: pathlib.Path, baselines: pathlib.Path, *options: str) -> str:
    arguments = [sys.executable, "-m", "acrlpd.cli.main", "regress", command, str(path), "--baselines", str(baselines)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*arguments, *options], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    if done.returncode not in (0, 1):
        sys.exit(f"{command} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
