"""The wall clock jumps while a run trains, mostly back, by seconds to years, and the run is killed and resumed.

A library for LD_PRELOAD (clock.c) changes the time of day of the processes, except for tensorstore. The time stamps of
files stay those of the machine. Training must come to the same bits, times in the metrics must make sense, and
`acrlpd watch` and `acrlpd report` must work under a clock that is behind the files.
"""

import mmap
import pathlib
import re
import struct
import subprocess
import time
from collections.abc import Callable

from harness import PATIENCE_S, Process, Run, Trial, acrlpd, check, check_same_run, compile_shim, last_step, soak_trial
from training_helpers import online_config

from acrlpd.config import RLTrainConfig
from acrlpd.files import read_json_lines

OFFLINE, ONLINE = 300, 200
LAST = OFFLINE + ONLINE
JUMPS_S = (1, 60, 3600, 86_400, 30 * 86_400, 3 * 365 * 86_400)
OFFSET = struct.Struct("q")


def config_of(trial: Trial, name: str) -> RLTrainConfig:
    return online_config(
        trial.directory / "runs",
        exp_name=name,
        env__id="async_toy:slow-toy",
        offline_steps=OFFLINE,
        online_steps=ONLINE,
        online__start_steps=60,
        online__update_to_data_ratio=0.5,
        eval_frequency=100,
        save_frequency=30,
        log_frequency=10,
        logging__tensorboard=True,
    )


class WallClock:
    """The clock of the processes that get `variables` into their environment."""

    def __init__(self, trial: Trial) -> None:
        path = trial.directory / "offset"
        path.write_bytes(bytes(OFFSET.size))
        self._file = path.open("r+b")
        self._offset = mmap.mmap(self._file.fileno(), OFFSET.size)
        self._rng = trial.rng
        self.variables = {"LD_PRELOAD": str(compile_shim(trial, "clock")), "SOAK_CLOCK": str(path)}

    def jump(self) -> int:
        """Sets the clock back, or one time in five forward; returns by how many seconds."""
        seconds = self._rng.choice(JUMPS_S) * self._rng.choice((-1, -1, -1, -1, 1))
        now = OFFSET.unpack(self._offset[:])[0]
        # Between 2000 and 2100: other times no computer has.
        seconds = seconds if -25 * 365 * 86_400 < now + seconds < 70 * 365 * 86_400 else -seconds
        self._offset[:] = OFFSET.pack(now + seconds)
        return seconds


def look_on(run: Run) -> None:
    """What a user sees of the run, now and under this clock."""
    for command in (("watch", run.directory, "--once"), ("report", run.directory)):
        seen = subprocess.run(
            acrlpd(*command), capture_output=True, text=True, env=run.environment, timeout=PATIENCE_S, check=False
        )
        check(seen.returncode == 0, f"acrlpd {command[0]} ended with {seen.returncode}:\n{seen.stdout}{seen.stderr}")
        check(not re.search(r"-\d+(\.\d+)? (s|min|h|d)\b", seen.stdout), f"a negative time in:\n{seen.stdout}")


def jump_until(trial: Trial, process: Process, clock: WallClock, is_done: Callable[[], bool]) -> int:
    """Lets the clock jump until something is done or the process ends; returns how often."""
    jumps = 0
    while not is_done() and process.poll() is None:
        time.sleep(trial.rng.uniform(0.2, 2.0))
        clock.jump()
        jumps += 1
    return jumps


def main() -> None:
    with soak_trial("clock", __doc__, trials=5) as trial:
        straight = Run(trial, config_of(trial, "straight"))
        straight.finish()
        trial.say("the run under a steady clock has ended")
        clock, jumps = WallClock(trial), 0
        for number in range(trial.options.trials):
            run = Run(trial, config_of(trial, f"jumping-{number}"), **clock.variables)
            process = run.start()
            step = trial.rng.randrange(50, LAST - 50)
            jumps += jump_until(trial, process, clock, lambda run=run, step=step: last_step(run) >= step)
            look_on(run)
            process.kill()
            process = run.start()
            jumps += jump_until(trial, process, clock, lambda: False)
            check(process.wait() == 0, f"the run ended with {process.wait()}:\n{process.said[-3000:]}")
            look_on(run)
            check_same_run(run, straight, LAST)
            check_times(run.directory)
            trial.say(f"run {number + 1} of {trial.options.trials} is bit-equal after {jumps} jumps in all")
        trial.held(
            "the wall clock jumps during a run, by 1 s to 3 years, four times of five back; killed and resumed once",
            f"{jumps} jumps in {trial.options.trials} runs",
            "same bits as under a steady clock; times in metrics are sane; `watch` and `report` work",
        )


def check_times(directory: pathlib.Path) -> None:
    for line in read_json_lines(directory / "metrics.jsonl"):
        for name, value in line.items():
            sane = not name.startswith("timing/") or 0 <= value < 1e6
            check(sane, f"{directory}: {name} is {value} at step {line['step']}")


if __name__ == "__main__":
    main()
