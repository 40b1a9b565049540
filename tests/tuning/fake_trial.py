"""A trial that does not train: a program that writes the metrics which runs of this config would have.

Called as the process of a trial: TUNER train --config FILE --seeds .... The score is best at actor_lr_schedule.peak_lr
1e-3 and critic.num_critics 4. Some batch sizes stand for something that goes wrong.
"""

import json
import math
import os
import pathlib
import signal
import sys
import time

import yaml

DIVERGES, CRASHES, IS_KILLED, IS_KILLED_ONCE, WAITS, IS_NEVER_JUDGED, INTERRUPTS = range(11, 18)


def main() -> None:
    arguments = sys.argv[2:]
    config = yaml.safe_load(pathlib.Path(arguments[arguments.index("--config") + 1]).read_text())
    seeds = [int(seed) for seed in arguments[arguments.index("--seeds") + 1 :]]
    place = pathlib.Path(config["checkpoints"]["directory"])
    kind = config["batch_size"]
    if kind == CRASHES:
        print("acrlpd: this trial cannot be made")
        sys.exit(2)
    if kind == IS_KILLED or (kind == IS_KILLED_ONCE and not (place.parents[1] / "killed_once").exists()):
        (place.parents[1] / f"killed{'_once' * (kind == IS_KILLED_ONCE)}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if kind in (WAITS, INTERRUPTS) and not (place.parents[1] / "go").exists():
        (place.parents[1] / "waits").write_text(str(os.getpid()))
        if kind == INTERRUPTS:
            os.kill(int(sys.argv[1]), signal.SIGINT)  # the tuner
        time.sleep(600)
    is_slow = (place.parents[1] / "slow").exists()
    distance = abs(math.log10(config["actor_lr_schedule"]["peak_lr"]) + 3) + abs(config["critic"]["num_critics"] - 4)
    for seed in seeds:
        run = place / config["name"] / f"{config['exp_name']}-seed{seed}"
        (run / str(config["training"]["offline_steps"])).mkdir(parents=True)  # a checkpoint
        write(run / "metrics.jsonl", config, max(0.0, 1 - distance / 5 - 0.01 * seed), is_slow)
        (run / "summary.json").write_text(json.dumps({"status": "finished"}))
    if is_slow or kind == DIVERGES:
        time.sleep(600)  # until the tuner ends it


def write(file: pathlib.Path, config: dict, score: float, is_slow: bool) -> None:
    """A trial that is slow comes to its first evaluation, and finds nothing there."""
    steps, frequency = config["training"]["offline_steps"], config["training"]["eval_frequency"]
    score = 0.0 if is_slow else score
    with file.open("w") as lines:
        for step in [frequency] if is_slow else sorted({*range(frequency, steps, frequency), steps}):
            skipped = 1.0 if config["batch_size"] == DIVERGES else 0.0
            print(json.dumps({"step": step, "phase": "offline", "update_skipped": skipped}), file=lines)
            if config["batch_size"] not in (DIVERGES, IS_NEVER_JUDGED):
                print(json.dumps({"step": step, "eval/success_rate": score * step / steps}), file=lines)


if __name__ == "__main__":
    main()
