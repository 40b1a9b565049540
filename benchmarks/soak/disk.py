"""The disk is full from the k-th write of a run on, for every k of a run, or for `--trials` of them.

A library for LD_PRELOAD (full_disk.c) counts and refuses what needs space in the folder of the runs: creating, writing,
renaming and syncing files, in Python and in C++. Every second time the disk stays full until the process ends, else
space comes back after a few calls. The run may go on and say what it could not write, or end with an exit code and a
message that name the problem, without a traceback. When there is space again, the run must come to the result of an
undisturbed run.

The processes are forked from one that has imported everything, which saves most of their time.
"""

import mmap
import multiprocessing
import multiprocessing.process
import os
import pathlib
import re
import struct
import sys
from collections.abc import Iterator

from trial import PATIENCE_S, Run, Trial, Violation, check, check_same_run, compile_shim, environment, soak_trial
from training_helpers import online_config

from acrlpd.config import RLTrainConfig

OFFLINE, ONLINE = 6, 6
LAST = OFFLINE + ONLINE
FOREVER = 10**9
CALLS_UNTIL_SPACE_IS_BACK = 12
CONTROL = struct.Struct("3q")  # of full_disk.c: calls so far, the first one that fails, how many fail after it


def config_of(trial: Trial, name: str) -> RLTrainConfig:
    return online_config(
        trial.directory / "runs",
        exp_name=name,
        env__num_envs=1,
        evaluation__num_episodes=1,
        offline_steps=OFFLINE,
        online_steps=ONLINE,
        online__start_steps=10,
        online__update_to_data_ratio=0.4,
        save_frequency=4,
        log_frequency=3,
        logging__tensorboard=True,
        checkpoints__max_to_keep=1,
    )


def train(arguments: list[str], log: pathlib.Path) -> None:
    """`acrlpd` in a forked process, whose output goes to `log`."""
    from acrlpd.cli.main import main

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(main(arguments))


class Disk:
    """The folder of the runs on a disk that can be full."""

    def __init__(self, trial: Trial) -> None:
        control = trial.directory / "control"
        control.write_bytes(bytes(CONTROL.size))
        self._file = control.open("r+b")
        self._control = mmap.mmap(self._file.fileno(), CONTROL.size)
        library = compile_shim(trial, "full_disk")
        root = str(trial.directory / "runs")
        os.environ.update(environment(trial, LD_PRELOAD=str(library), SOAK_ROOT=root, SOAK_CONTROL=str(control)))
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["acrlpd.cli.train", "acrlpd.training.experiment", "tensorboardX"])

    def run(self, run: Run, first_failure: int = 0, num_failures: int = 0) -> tuple[int, str, int]:
        """Starts or resumes the run on this disk: its exit code, what it said, and the number of calls it made."""
        said = run.log.stat().st_size if run.log.exists() else 0
        self._control[:] = CONTROL.pack(0, first_failure, num_failures)
        process = self._processes.Process(target=train, args=(run.arguments(), run.log))
        process.start()
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise Violation(f"a process hung; its log is {run.log}")
        num_calls = CONTROL.unpack(self._control[:])[0]
        return process.exitcode, run.log.read_bytes()[said:].decode(errors="replace"), num_calls


def check_full_disk(disk: Disk, run: Run, straight: Run, first_failure: int, num_failures: int) -> str:
    """Returns how the run took it."""
    where = f"{run.directory}, full from call {first_failure} on for {num_failures} calls"
    code, said, num_calls = disk.run(run, first_failure, num_failures)
    if num_calls >= first_failure:
        named = re.search(r"No space left|could not be written|cannot be written|cannot make", said)
        check(named, f"{where}: exit code {code}, and no word about the disk:\n{said[-3000:]}")
    check("Traceback" not in said, f"{where}: a traceback:\n{said[-6000:]}")
    check(code in (0, 1, 2), f"{where}: exit code {code}:\n{said[-3000:]}")
    if code:
        resumed, said, _ = disk.run(run)
        check(resumed == 0, f"{where}: --resume ended with {resumed} when there was space again:\n{said[-3000:]}")
    check_same_run(run, straight, LAST)
    return "ended and resumed" if code else "went on"


def places(trial: Trial, num_calls: int) -> Iterator[tuple[int, int]]:
    """The first call that fails, and how many fail after it: all calls in turn, or evenly spread ones."""
    trials = min(int(trial.options.trials) or num_calls, num_calls)
    for i in range(trials):
        first = int((i + trial.rng.random()) * num_calls / trials) + 1
        yield first, trial.rng.choice((FOREVER, CALLS_UNTIL_SPACE_IS_BACK))


def main() -> None:
    with soak_trial("disk", __doc__, trials=0) as trial:
        straight = Run(trial, config_of(trial, "straight"))
        disk = Disk(trial)
        code, said, num_calls = disk.run(straight)
        check(code == 0, f"the undisturbed run ended with {code}:\n{said[-3000:]}")
        trial.say(f"the undisturbed run makes {num_calls} calls")
        took = {"ended and resumed": 0, "went on": 0}
        for first_failure, num_failures in places(trial, num_calls):
            run = Run(trial, config_of(trial, f"full-{first_failure}-{num_failures}"))
            how = check_full_disk(disk, run, straight, first_failure, num_failures)
            took[how] += 1
            trial.say(f"{sum(took.values())}: full from call {first_failure}: {how}")
        trial.held(
            f"disk full (ENOSPC) at one of the {num_calls} calls of a small run that need space, offline and online: "
            "until the process ends, or for a while",
            f"{sum(took.values())} places",
            f"{took['went on']} runs went on and said what they could not write, {took['ended and resumed']} ended with "
            "a message; all came to the same bits, resumed where they had ended",
        )


if __name__ == "__main__":
    main()
