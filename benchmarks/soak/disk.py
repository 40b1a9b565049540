"""The disk is full from the k-th write of a run on, for `--trials` values of k; 0 stands for every write of the run.

A library for LD_PRELOAD (full_disk.c) counts and refuses what needs space in the folder of the runs: creating, writing,
renaming and syncing files, in Python and in C++. Half of the times the disk stays full until the process ends, else
space comes back after a few calls. The run may go on and say what it could not write, or end with an exit code and a
message about the disk, without a traceback. When there is space again, the run must come to the result of an
undisturbed run.
"""

import mmap
import re
import struct
from collections.abc import Iterator

from harness import Run, Trial, check, check_same_run, compile_shim, soak_trial
from training_helpers import online_config

from acrlpd.config import RLTrainConfig

OFFLINE, ONLINE = 4, 6
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
        save_frequency=7,
        log_frequency=3,
        logging__tensorboard=True,
        checkpoints__max_to_keep=1,
    )


class Disk:
    """A disk that can be full; runs with `variables` in their environment are on this disk."""

    def __init__(self, trial: Trial) -> None:
        control = trial.directory / "control"
        control.write_bytes(bytes(CONTROL.size))
        self._file = control.open("r+b")
        self._control = mmap.mmap(self._file.fileno(), CONTROL.size)
        self.variables = {
            "LD_PRELOAD": str(compile_shim(trial, "full_disk")),
            "SOAK_ROOT": str(trial.directory / "runs"),
            "SOAK_CONTROL": str(control),
        }

    def train(self, run: Run, first_failure: int = 0, num_failures: int = 0) -> tuple[int, str, int]:
        """Starts or resumes the run: its exit code, what it said, and the number of calls that needed space."""
        self._control[:] = CONTROL.pack(0, first_failure, num_failures)
        process = run.start()
        code = process.wait()
        return code, process.said, CONTROL.unpack(self._control[:])[0]


def check_full_disk(disk: Disk, run: Run, straight: Run, first_failure: int, num_failures: int) -> str:
    """Returns how the run took it."""
    where = f"{run.directory}, full from call {first_failure} on for {num_failures} calls"
    code, said, num_calls = disk.train(run, first_failure, num_failures)
    if num_calls >= first_failure:
        named = re.search(r"No space left|could not be written|cannot be written|cannot make", said)
        check(named, f"{where}: exit code {code}, and no word about the disk:\n{said[-3000:]}")
    check("Traceback" not in said, f"{where}: a traceback:\n{said[-6000:]}")
    check(code in (0, 1, 2), f"{where}: exit code {code}:\n{said[-3000:]}")
    if code:
        resumed, said, _ = disk.train(run)
        check(resumed == 0, f"{where}: --resume ended with {resumed} when there was space again:\n{said[-3000:]}")
    check_same_run(run, straight, LAST)
    return "ended and resumed" if code else "went on"


def places(trial: Trial, num_calls: int) -> Iterator[tuple[int, int]]:
    """The first call that fails, and how many fail after it, evenly spread over the run."""
    trials = min(int(trial.options.trials) or num_calls, num_calls)
    for i in range(trials):
        first = int((i + trial.rng.random()) * num_calls / trials) + 1
        yield first, trial.rng.choice((FOREVER, CALLS_UNTIL_SPACE_IS_BACK))


def main() -> None:
    with soak_trial("disk", __doc__, trials=60) as trial:
        disk = Disk(trial)
        straight = Run(trial, config_of(trial, "straight"), **disk.variables)
        code, said, num_calls = disk.train(straight)
        check(code == 0, f"the undisturbed run ended with {code}:\n{said[-3000:]}")
        trial.say(f"the undisturbed run makes {num_calls} calls")
        took = {"ended and resumed": 0, "went on": 0}
        for first_failure, num_failures in places(trial, num_calls):
            run = Run(trial, config_of(trial, f"full-{first_failure}-{num_failures}"), **disk.variables)
            how = check_full_disk(disk, run, straight, first_failure, num_failures)
            took[how] += 1
            trial.say(f"{sum(took.values())}: full from call {first_failure}: {how}")
        trial.held(
            f"disk full (ENOSPC) at one of the {num_calls} calls of a small run that need space, offline and online: "
            "until the process ends, or for a while",
            f"{sum(took.values())} places",
            f"{took['went on']} runs went on and said what they could not write, {took['ended and resumed']} ended "
            "with a message and were resumed; all came to the same bits",
        )


if __name__ == "__main__":
    main()
