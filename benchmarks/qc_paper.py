"""The Q-chunking paper's methods on its tasks, against the curves that the paper published.

    python benchmarks/qc_paper.py train --domain cube-double --method qc --data data/cube_double --directory /tmp/qc
    python benchmarks/qc_paper.py collect /tmp/qc
    python benchmarks/qc_paper.py table
    python benchmarks/qc_paper.py figure --domain cube-double [--task task2]

`train` trains all tasks of a domain in one process, for all seeds, with `acrlpd train`; what it is given beyond its own
flags goes there, --resume for example. `collect` adds the evaluations of all runs below a directory to runs.json, where
a run replaces what was stored of the same run before. `table` compares, and `figure` draws the mean over the tasks or
one task.

The paper's numbers are in qc_paper/paper.json: success in percent, mean over its seeds with a 95 % interval, the first
million updates offline and the second online.
"""

import argparse
import datetime
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from acrlpd.config import get_config, to_dict

FOLDER = pathlib.Path(__file__).parent / "qc_paper"
RUNS = FOLDER / "runs.json"
DOMAINS = ("cube-double", "cube-triple", "cube-quadruple", "scene", "puzzle-3x3")
METHODS = ("QC", "QC-FQL", "BFN", "BFN-n", "FQL", "FQL-n", "RLPD", "RLPD-AC")
TASKS = tuple(f"task{number}" for number in range(1, 6))

Run = dict[str, Any]


def preset(method: str, domain: str) -> str:
    return f"{method}-{domain}".lower().replace("-", "_")


def train(domain: str, method: str, data: str, directory: str, seeds: list[int], words: list[str]) -> int:
    """Trains all tasks of a domain together; gives the exit status."""
    command = [sys.executable, "-m", "acrlpd.cli.main", "train", "--config", preset(method, domain), "--no_wandb"]
    command += ["--data_dir", f"{data}/train", "--exp_name", "paper", "--checkpoint_dir", directory]
    command += ["--tasks", *TASKS, "--seeds", *map(str, seeds), *words]
    return subprocess.run(command, check=False).returncode


# -- collecting


def collect(directory: pathlib.Path) -> list[Run]:
    """The runs of the paper's presets below a directory, with their evaluations."""
    presets = {preset(method, domain): (method, domain) for method in METHODS for domain in DOMAINS}
    found = []
    for path in sorted(directory.rglob("config.yaml")):
        config = yaml.safe_load(path.read_text())
        if config.get("name") not in presets or not (path.parent / "metrics.jsonl").is_file():
            continue
        if others := other_settings(config):
            print(f"{path.parent} is left out, because it differs from its preset in {', '.join(others)}")
            continue
        found.append(read_run(path.parent, *presets[config["name"]], config))
    return found


def other_settings(config: dict[str, Any]) -> list[str]:
    """The settings of a run that make it another experiment than its preset; the precision is stored with the run."""
    expected = to_dict(get_config(config["name"]))
    sections = ("model", "critic", "acrlpd", "improvement", "qchunking", "batch_size")
    changed = [name for name in sections if without_dtype(config[name]) != without_dtype(expected[name])]
    return changed + ["env.max_episode_steps"] * (config["env"].get("max_episode_steps") is not None)


def without_dtype(section: Any) -> Any:
    plain = json.loads(json.dumps(section))  # tuples become lists, as in the file
    return {name: value for name, value in plain.items() if name != "dtype"} if isinstance(plain, dict) else plain


def read_run(directory: pathlib.Path, method: str, domain: str, config: dict[str, Any]) -> Run:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(line["timing/step_s"] for line in lines if "timing/step_s" in line)
    return {
        "method": method,
        "domain": domain,
        "task": next(task for task in TASKS if task in config["env"]["id"]),
        "seed": config.get("seed", 0),
        "dtype": config["model"].get("dtype", "float32"),
        # The shares of episodes that were successes: [update, successes, episodes].
        "points": sorted(read_evaluation(path) for path in directory.glob("evaluations/*/evaluation.json")),
        "ms_per_update": round(1000 * seconds[len(seconds) // 2], 3) if seconds else None,
        "collected": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
    }


def read_evaluation(path: pathlib.Path) -> list[int]:
    evaluation = json.loads(path.read_text())
    return [int(path.parent.name), evaluation["successes"], evaluation["episodes"]]


def store(runs: list[Run]) -> None:
    known = {run_key(run): run for run in load_runs()} | {run_key(run): run for run in runs}
    rows = [json.dumps(known[key]) for key in sorted(known)]
    RUNS.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def load_runs() -> list[Run]:
    return json.loads(RUNS.read_text()) if RUNS.is_file() else []


def run_key(run: Run) -> tuple[str, str, str, int, str]:
    return run["domain"], run["method"], run["task"], run["seed"], run["dtype"]


# -- comparing


def paper_curve(key: str, method: str) -> dict[int, tuple[float, float, float]]:
    """Update -> success in percent with its interval, of a task such as cube-double-play-task1 or of a domain.

    RLPD and RLPD-AC have no offline phase. The paper draws them from its first online update on, here from 0.
    """
    curve = json.loads((FOLDER / "paper.json").read_text())["curves"][key][method]
    steps = [round(1e6 * (step - curve["steps_millions"][0])) for step in curve["steps_millions"]]
    columns = zip(curve["success_percent"], curve["low"], curve["high"], strict=True)
    return dict(zip(steps, columns, strict=True))


def our_points(runs: list[Run]) -> dict[int, tuple[float, float, int]]:
    """Update -> (success in percent, half of its 95 % interval, number of runs), of runs of any tasks and seeds.

    Every task counts the same. The interval is that of the sampled episodes; seeds would add to it.
    """
    steps = sorted({step for run in runs for step, _, _ in run["points"]})
    return {step: _mean_over_tasks(runs, step) for step in steps}


def _mean_over_tasks(runs: list[Run], step: int) -> tuple[float, float, int]:
    rates, variances, count = [], [], 0
    for task in sorted({run["task"] for run in runs}):
        points = [point for run in runs if run["task"] == task for point in run["points"] if point[0] == step]
        episodes = sum(point[2] for point in points)
        if not episodes:
            return math.nan, math.nan, 0  # A mean over some of the tasks would be a mean of other tasks.
        rate = sum(point[1] for point in points) / episodes
        careful = (rate * episodes + 2) / (episodes + 4)  # Agresti and Coull: an interval also for 0 of 50
        rates.append(rate)
        variances.append(careful * (1 - careful) / (episodes + 4))
        count += len(points)
    return 100 * sum(rates) / len(rates), 196 * math.sqrt(sum(variances)) / len(rates), count


def table_rows(runs: list[Run]) -> Iterator[list[str]]:
    for domain in DOMAINS:
        for method in METHODS:
            for dtype in ("float32", "bfloat16"):
                some = [run for run in runs if (run["domain"], run["method"], run["dtype"]) == (domain, method, dtype)]
                groups = {task: [run for run in some if run["task"] == task] for task in TASKS}
                if some and all(groups.values()):
                    groups["mean"] = some
                for name, group in groups.items():
                    key = domain if name == "mean" else f"{domain}-play-{name}"
                    yield from _compare([domain, method, dtype, name], group, paper_curve(key, method))


def _compare(names: list[str], runs: list[Run], paper: dict[int, tuple[float, float, float]]) -> Iterator[list[str]]:
    for step, (rate, error, count) in our_points(runs).items():
        if step not in paper or math.isnan(rate):
            continue
        mean, low, high = paper[step]
        verdict = "yes" if low - error <= rate <= high + error else "no"
        ours, theirs = f"{rate:.1f} ± {error:.1f}", f"{mean:.1f} ({low:.1f} to {high:.1f})"
        yield [*names, f"{step:,}", str(count), ours, theirs, verdict]


def print_table(runs: list[Run]) -> None:
    header = ("domain", "method", "products", "task", "updates", "runs", "ours, %", "the paper's, %", "agrees")
    print("|" + "|".join(header) + "|\n" + "|---" * len(header) + "|")
    for row in table_rows(runs):
        print("|" + "|".join(row) + "|")


# -- drawing

_COLOURS = dict(
    zip(METHODS, ("#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf"), strict=True)
)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 340, 56, 150, 34, 44


def draw(domain: str, task: str | None, runs: list[Run]) -> str:
    """Success on a task, or mean over all tasks: the paper's curves with their bands, our points with their intervals.

    Points of runs in bfloat16 are filled, those of runs in float32 are rings.
    """
    shown = [method for method in METHODS if any(run["method"] == method for run in runs)]
    key, title = domain, f"{domain}: mean success of its five tasks, %"
    if task:
        key, title = f"{domain}-play-{task}", f"{domain}, {task}: success, %"
    steps = [step for run in runs for step, _, _ in run["points"]]
    last = max(1_000_000, -(-max(steps, default=0) // 200_000) * 200_000)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last

    def y(percent: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - percent / 100)

    parts = [_text(_LEFT, 18, title, "start")]
    for percent in range(0, 101, 25):
        parts.append(f'<path d="M{_LEFT} {y(percent):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y(percent) + 4, str(percent), "end"))
    parts += [_text(x(step), _HEIGHT - _BOTTOM + 18, f"{step / 1e6:g}") for step in range(0, last + 1, 200_000)]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "million updates"))
    for line, method in enumerate(shown):
        colour = _COLOURS[method]
        curve = [(step, *values) for step, values in paper_curve(key, method).items() if step <= last]
        upper = [f"{x(step):.1f},{y(high):.1f}" for step, _, _, high in curve]
        lower = [f"{x(step):.1f},{y(low):.1f}" for step, _, low, _ in reversed(curve)]
        middle = " ".join(f"{x(step):.1f},{y(mean):.1f}" for step, mean, _, _ in curve)
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-dasharray="4 3"/>')
        for dtype, fill in (("bfloat16", colour), ("float32", "white")):
            ours = [run for run in runs if (run["method"], run["dtype"]) == (method, dtype)]
            for step, (rate, error, _) in our_points(ours).items():
                if not math.isnan(rate):
                    bounds = f"M{x(step):.1f} {y(max(rate - error, 0)):.1f}V{y(min(rate + error, 100)):.1f}"
                    parts.append(f'<path d="{bounds}" stroke="{colour}" stroke-width="2"/>')
                    place = f'cx="{x(step):.1f}" cy="{y(rate):.1f}"'
                    parts.append(f'<circle {place} r="4" fill="{fill}" stroke="{colour}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 16 + 36 * line, f"● {method}, ours", "start", colour))
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 32 + 36 * line, "┄ the paper's, 95 %", "start", colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _text(at_x: float, at_y: float, content: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{colour}">{content}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--domain", choices=DOMAINS, required=True)
    training.add_argument("--method", choices=METHODS, default="QC")
    training.add_argument("--data", required=True, help="directory that `acrlpd data ogbench` made")
    training.add_argument("--directory", required=True, help="where the runs go")
    training.add_argument("--seeds", type=int, nargs="+", default=[0])
    commands.add_parser("collect").add_argument("directory", type=pathlib.Path)
    commands.add_parser("table")
    drawing = commands.add_parser("figure")
    drawing.add_argument("--domain", choices=DOMAINS, required=True)
    drawing.add_argument("--task", choices=TASKS, help="one task; without it, the mean of all five")
    args, words = parser.parse_known_args()
    if words and args.command != "train":
        parser.error(f"unknown arguments: {' '.join(words)}")
    if args.command == "train":
        sys.exit(train(args.domain, args.method, args.data, args.directory, args.seeds, words))
    if args.command == "collect":
        runs = collect(args.directory)
        store(runs)
        print(f"{len(runs)} runs below {args.directory} are in {RUNS}")
    elif args.command == "table":
        print_table(load_runs())
    else:
        path = FOLDER / f"{args.domain.replace('-', '_')}{f'_{args.task}' if args.task else ''}.svg"
        runs = [run for run in load_runs() if run["domain"] == args.domain and args.task in (None, run["task"])]
        path.write_text(draw(args.domain, args.task, runs))
        print(path)


if __name__ == "__main__":
    main()
