"""Runs the trials of the soak and writes the table of their results: `make soak`, about an hour.

The trial of the server waits most of the time, so it runs beside the others, which run one after another. To run some
trials again, name them: the table holds the newest result of every trial that has one in the folder `--results`. A
trial that finds a violation does not stop the other trials; the exit code is 1 then.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

from harness import REPOSITORY, machine

HERE = pathlib.Path(__file__).parent
TRIALS = ("server", "kills", "clock", "hosts", "disk", "fuzz")


def start(name: str, results: pathlib.Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(HERE / f"{name}.py"), "--results", str(results)])


def table(results: pathlib.Path) -> str:
    """What was done, how often, and what held, for each trial that has results."""
    lines = [
        f"# Soak, {datetime.date.today()}",
        "",
        f"{machine()}. `make soak`; the scripts are in `benchmarks/soak/` and say what each trial does.",
        "",
        "| trial | what was done | how often | what held | commit, seed, minutes |",
        "|---|---|---|---|---|",
    ]
    for name in TRIALS:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text())
        origin = f"{content['commit']}, {content['seed']}, {content['seconds'] / 60:.0f}"
        cells = [(row["what"], row["how_often"], row["result"]) for row in content["rows"]]
        if content["violation"] is not None:
            cells.append(("", "", f"**violated**: {content['violation'].splitlines()[0]}"))
        lines += [f"| `{name}.py` | {' | '.join(row)} | {origin} |" for row in cells]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", help=f"default: all of {', '.join(TRIALS)}")
    parser.add_argument("--results", type=pathlib.Path, default=REPOSITORY / "build" / "soak")
    options = parser.parse_args()
    names = options.trials or TRIALS
    if unknown := set(names) - set(TRIALS):
        parser.error(f"there is no trial {', '.join(sorted(unknown))}; the trials are {', '.join(TRIALS)}")
    beside = start("server", options.results) if "server" in names else None
    codes = [start(name, options.results).wait() for name in names if name != "server"]
    if beside is not None:
        codes.append(beside.wait())
    page = REPOSITORY / "benchmarks" / f"soak-{datetime.date.today()}.md"
    page.write_text(table(options.results))
    print(f"wrote {page}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
