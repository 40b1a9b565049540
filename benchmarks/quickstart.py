"""A preset with all that it is compared with, as a user starts it: `quickstart`, or `aloha_sim` on one GPU.

    python benchmarks/quickstart.py --seeds 0 1 2 --directory /tmp/quickstart
    python benchmarks/quickstart.py --config aloha_sim --seeds 0 --directory /tmp/aloha --figure aloha_sim.svg

One `acrlpd train --seeds ...` trains all seeds together, from demonstrations to report. The seeds share the
demonstrations; weights, batches and exploration change with the seed. Seeds that are finished are not repeated, and
seeds that were interrupted go on. Prints Markdown: the outcome of every seed, the mean over seeds with its 95 %
interval (Student's t, as in the report of several seeds), of the first seed its intervals and its learning curve (drawn
with `--figure`), and where the time of all seeds went. `--report_only` runs nothing and prints what there is. Words
after `--` go to `acrlpd train`.
"""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from typing import Any

from acrlpd.evaluation.statistics import RATES, mean_over_seeds
from acrlpd.files import read_json_lines
from acrlpd.runs.record import BASELINES, STAGES

STARTED = "started"


def train(config: str, seeds: list[int], directory: pathlib.Path, words: list[str]) -> None:
    """`acrlpd train` from demonstrations to the report of all seeds, unless all seeds are finished."""
    runs = [directory_of(config, seed, directory) for seed in seeds]
    if all((run / "report.html").exists() for run in runs):
        return
    options = {
        "--exp_name": config,
        "--checkpoint_dir": directory / "checkpoints",
        "--data_dir": directory / "data",
        "--data.assets_dir": directory / "assets",
    }
    command = [sys.executable, "-m", "acrlpd.cli.main", "train", "--config", config, "--seeds", *map(str, seeds)]
    command += [str(word) for option in options.items() for word in option] + words
    if any(run.exists() for run in runs):
        command.append("--resume")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / STARTED).touch()
    subprocess.run(command, check=True, stdout=sys.stderr)  # stdout is for the result


def directory_of(config: str, seed: int, directory: pathlib.Path) -> pathlib.Path:
    return directory / "checkpoints" / config / f"{config}-seed{seed}"


def outcomes(run_directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Evaluation of every policy that is finished; of a run that was cut off, the last of each phase."""
    found: dict[str, dict[str, Any]] = {}
    for name in STAGES:
        summary = run_directory / BASELINES / name / "summary.json"
        if summary.exists():
            found[name] = json.loads(summary.read_text())["evaluation"]["offline"]
    summary = run_directory / "summary.json"
    if summary.exists():
        found |= json.loads(summary.read_text())["evaluation"]
    else:
        for point in learning_curve(run_directory):
            found[point["phase"]] = {
                "step": point["step"],
                "success_rate": point["rate"],
                "interval": point["interval"],
            }
    return {name: found[name] for name in STAGES if name in found}


def learning_curve(run_directory: pathlib.Path) -> list[dict[str, Any]]:
    """Every evaluation of the run itself, with the environment steps lived by then."""
    points, phase, env_steps = [], "offline", 0
    path = run_directory / "metrics.jsonl"
    for line in read_json_lines(path) if path.exists() else ():
        phase = line.get("phase", phase)
        env_steps = int(line.get("online/env_steps", env_steps))
        if "eval/success_rate" in line:
            interval = [line["eval/success_rate_low"], line["eval/success_rate_high"]]
            points.append(
                {"step": line["step"], "phase": phase, "rate": line["eval/success_rate"], "interval": interval}
                | {"env_steps": env_steps}
            )
    return points


def print_outcomes(runs: dict[int, dict[str, dict[str, Any]]]) -> None:
    print(f"| policy | {' | '.join(f'seed {seed}' for seed in runs)} | mean | 95 % of the mean |")
    print("|---|" + "---|" * (len(runs) + 2))
    for name, description in STAGES.items():
        rates = [stages[name]["success_rate"] if name in stages else None for stages in runs.values()]
        known = [rate for rate in rates if rate is not None]
        cells = ["" if rate is None else f"{rate:.0%}" for rate in rates]
        found = mean_over_seeds(known, RATES) if known else None
        mean = f"**{found.mean:.0%}**" if found else ""
        interval = "{:.0%} to {:.0%}".format(*found.interval) if found and found.interval else ""
        print(f"| {description} (`{name}`) | {' | '.join(cells)} | {mean} | {interval} |")


def success_lengths(run_directory: pathlib.Path, name: str, step: int) -> list[int]:
    """Steps of every success: one far shorter than a demonstration is an accident, not the task."""
    owner = run_directory if name in ("offline", "online") else run_directory / BASELINES / name
    path = owner / "evaluations" / str(step) / "evaluation.json"
    if not path.exists():
        return []
    return sorted(e["length"] for e in json.loads(path.read_text())["per_episode"] if e["success"])


def print_details(run_directory: pathlib.Path, found: dict[str, dict[str, Any]], points: list[dict[str, Any]]) -> None:
    print("\n| policy | updates | success | 95 % interval | episodes | steps of a success: least, median |")
    print("|---|---|---|---|---|---|")
    for name, result in found.items():
        low, high = result["interval"]
        episodes = f"{result['episodes']:.0f}" if "episodes" in result else ""
        lengths = success_lengths(run_directory, name, result["step"])
        steps = f"{lengths[0]}, {statistics.median(lengths):.0f}" if lengths else ""
        print(
            f"| `{name}` | {result['step']:,} | {result['success_rate']:.0%} | {low:.0%} to {high:.0%} | {episodes} | "
            f"{steps} |"
        )
    print("\n| updates | phase | environment steps | success | 95 % interval |\n|---|---|---|---|---|")
    for point in points:
        low, high = point["interval"]
        print(
            f"| {point['step']:,} | {point['phase']} | {point['env_steps']:,} | {point['rate']:.0%} | "
            f"{low:.0%} to {high:.0%} |"
        )


def print_times(config: str, seed: int, directory: pathlib.Path) -> None:
    """Wall time by part, from when each began for this seed: the seeds train together. The run itself by activity."""
    run_directory = directory_of(config, seed, directory)
    baselines = run_directory / BASELINES
    began = {
        "demonstrations": directory / STARTED,
        "norm statistics, start": directory / "data" / "meta" / "info.json",
        "`bc`": baselines / "bc" / "config.yaml",
        "`bc_success_only`": baselines / "bc_success_only" / "config.yaml",
        "`offline` and `online`": run_directory / "config.yaml",
        "`offline_continued`": baselines / "offline_continued" / "config.yaml",
        "report": baselines / "offline_continued" / "summary.json",
        "": run_directory.with_name(f"{config}-seeds.html"),
    }
    times = [(name, path.stat().st_mtime) for name, path in began.items() if path.exists()]
    print("\n| part | s |\n|---|---|")
    for (name, start), (_, end) in itertools.pairwise(times):
        print(f"| {name} | {end - start:.0f} |")
    if times:
        print(f"| **all** | **{times[-1][1] - times[0][1]:.0f}** |")
    metrics = run_directory / "metrics.jsonl"
    lines = [line for line in read_json_lines(metrics) if "timing/step_s" in line] if metrics.exists() else []
    for phase in ("offline", "online"):
        seconds = [(line["timing/step_s"], line["timing/data_wait_s"]) for line in lines if line["phase"] == phase]
        if seconds:
            step, wait = (statistics.median(values) * 1e3 for values in zip(*seconds, strict=True))
            print(f"\nAn update takes {step:.1f} ms {phase}, and waits {wait:.1f} ms for data.")
    summary = run_directory / "summary.json"
    if summary.exists():
        spent = json.loads(summary.read_text())["time_s"]
        print(
            "\nThe run itself, in seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in spent.items()) + "."
        )


def draw(path: pathlib.Path, title: str, found: dict[str, dict[str, Any]], points: list[dict[str, Any]]) -> None:
    """The learning curve with its intervals, and the other policies as lines."""
    width, height, left, top = 640, 320, 56, 34
    last = max([point["step"] for point in points] + [result["step"] for result in found.values()] + [1])

    def x(step: float) -> float:
        return left + (width - left - 150) * step / last

    def y(rate: float) -> float:
        return top + (height - top - 44) * (1 - rate)

    def text(at_x: float, at_y: float, content: str, anchor: str = "middle") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{content}</text>'

    parts = [text(left, 18, title, "start")]
    for i in range(5):
        parts.append(f'<path d="M{x(0):.1f} {y(i / 4):.1f}H{x(last):.1f}" stroke="#ddd"/>')
        parts.append(text(left - 6, y(i / 4) + 4, f"{25 * i} %", "end"))
    tick = next(
        step for power in itertools.count() for step in (10**power, 2 * 10**power, 5 * 10**power) if step * 5 >= last
    )
    parts += [text(x(step), height - 26, f"{step:,}") for step in range(0, last + 1, tick)]
    parts.append(text(x(last / 2), height - 8, "updates"))
    online = [point["step"] for point in points if point["phase"] == "online"]
    if online and "offline" in found:
        begin = x(found["offline"]["step"])
        parts.append(f'<path d="M{begin:.1f} {y(0):.1f}V{y(1):.1f}" stroke="#999" stroke-dasharray="2 3"/>')
        parts.append(text(begin + 4, y(1) + 12, "online", "start"))
    labels = sorted(
        (result["success_rate"], name) for name, result in found.items() if name not in ("offline", "online")
    )
    labels_y = y(0)
    for rate, name in labels:
        labels_y = min(y(rate), labels_y - 14)
        parts.append(f'<path d="M{x(0):.1f} {y(rate):.1f}H{x(last):.1f}" stroke="#c60" stroke-dasharray="6 4"/>')
        parts.append(text(x(last) + 6, labels_y + 4, f"{name} {rate:.0%}", "start"))
    for point in points:
        low, high = point["interval"]
        parts.append(
            f'<path d="M{x(point["step"]):.1f} {y(low):.1f}V{y(high):.1f}" stroke="#06c" stroke-opacity=".4"/>'
        )
        parts.append(f'<circle cx="{x(point["step"]):.1f}" cy="{y(point["rate"]):.1f}" r="3.5" fill="#06c"/>')
    line = " ".join(f"{x(point['step']):.1f},{y(point['rate']):.1f}" for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="2"/>')
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def machine() -> str:
    """Asks no device: a run may be using it."""
    commit = _output("git", "rev-parse", "--short", "HEAD") or "unknown"
    device = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").replace("\n", ", ") or "no GPU"
    return (
        f"{datetime.date.today()}, commit {commit}, {device}, {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("quickstart-benchmark"))
    parser.add_argument("--figure", type=pathlib.Path, help="SVG file for the first seed's learning curve")
    parser.add_argument("--report_only", action="store_true")
    parser.add_argument("words", nargs="*", help="options of `acrlpd train`, after --")
    args = parser.parse_args()
    if not args.report_only:
        train(args.config, args.seeds, args.directory, args.words)
    runs = {seed: outcomes(directory_of(args.config, seed, args.directory)) for seed in args.seeds}
    first = args.seeds[0]
    points = learning_curve(directory_of(args.config, first, args.directory))
    print(f"# `{args.config}` and what it is compared with\n\n{machine()}\n")
    print_outcomes(runs)
    print(f"\n## Seed {first}")
    print_details(directory_of(args.config, first, args.directory), runs[first], points)
    print("\n## Time of all seeds")
    print_times(args.config, first, args.directory)
    if args.figure is not None:
        draw(args.figure, f"{args.config}: success rate", runs[first], points)


if __name__ == "__main__":
    main()
