"""Making the report of a long run: time from the shell, size of the page. Prints a Markdown table.

python benchmarks/report.py              # 100,000 updates: a line of metrics every 100 and every single one
python benchmarks/report.py --steps 5000 # a smoke test
"""

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "monitoring"))

from run_factory import make_run

REPETITIONS = 3


def measure(command: list[str]) -> float:
    """Seconds of the median process, from its start to its end."""
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "acrlpd.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return sorted(times)[REPETITIONS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    print(f"{datetime.date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"\nRuns of {steps:,} updates; the median of {REPETITIONS} processes, start-up included.\n")
    print("| runs | lines of metrics | metrics.jsonl | `acrlpd report` | page | `acrlpd watch --once` |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for frequency, count in ((100, 1), (1, 1), (1, 2)):
            base = Path(directory) / f"{frequency}-{count}"
            runs = [
                make_run(
                    base / str(i),
                    offline_steps=steps * 4 // 5,
                    online_steps=steps - steps * 4 // 5,
                    log_frequency=frequency,
                    seed=i,
                )
                for i in range(count)
            ]
            page = base / "report.html"
            report = measure(["report", *map(str, runs), "--output", str(page)])
            watch = measure(["watch", str(runs[0]), "--once"])
            size = sum((run / "metrics.jsonl").stat().st_size for run in runs)
            print(
                f"| {count} | {steps // frequency:,} each | {size / 1e6:.1f} MB | {report:.2f} s "
                f"| {page.stat().st_size / 1e6:.2f} MB | {watch:.2f} s |"
            )


if __name__ == "__main__":
    main()
