"""The quick start over several seeds: demonstrations, weights, batches and exploration all change with the seed.

    python benchmarks/quickstart.py --seeds 0 1 2 --directory /tmp/quickstart

Every seed is a run of `acrlpd train --config quickstart` as a user starts it. Runs that are finished are
not repeated. Prints a Markdown table.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

ARMS = ("bc", "bc_success_only", "offline", "offline_continued", "online")


def run(seed: int, directory: pathlib.Path) -> tuple[dict, float | None]:
    """Its summary, and how many minutes it took, with demonstrations and compiles, if it was run now."""
    run_directory = directory / "checkpoints" / "quickstart" / f"seed{seed}"
    summary = run_directory / "summary.json"
    minutes = None
    if not summary.exists() or "bc" not in json.loads(summary.read_text())["evaluation"]:
        options = {
            "--seed": seed,
            "--exp_name": f"seed{seed}",
            "--checkpoint_dir": directory / "checkpoints",
            "--data_dir": directory / f"data-seed{seed}",
            "--data.assets_dir": directory / f"assets-seed{seed}",
            "--data.demonstrations.seed": seed,
        }
        command = [sys.executable, "-m", "acrlpd.cli", "train", "--config", "quickstart"]
        command += [str(word) for option in options.items() for word in option]
        started = time.monotonic()
        subprocess.run([*command, "--resume"] if run_directory.exists() else command, check=True)
        minutes = (time.monotonic() - started) / 60
    return json.loads(summary.read_text()), minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("quickstart-benchmark"))
    args = parser.parse_args()
    runs = {seed: run(seed, args.directory) for seed in args.seeds}
    summaries = {seed: summary for seed, (summary, _) in runs.items()}
    print(f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}\n")
    print(f"| policy | {' | '.join(f'seed {seed}' for seed in summaries)} | mean |")
    print("|---|" + "---|" * (len(summaries) + 1))
    for arm in ARMS:
        rates = [summary["evaluation"][arm]["success_rate"] for summary in summaries.values()]
        cells = [f"{rate:.0%}" for rate in [*rates, sum(rates) / len(rates)]]
        print(f"| {arm} | {' | '.join(cells)} |")
    minutes = ["" if m is None else f"{m:.1f}" for _, m in runs.values()]
    print(f"| minutes | {' | '.join(minutes)} | |")


if __name__ == "__main__":
    main()
