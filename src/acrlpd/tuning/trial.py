"""One trial: the runs of one config with several seeds, trained by `acrlpd train` in a process of its own.

A crash, a kill or a lack of memory ends the process of the trial and nothing else. Everything that a trial leaves lies
in its own directory: `config.yaml`, `log.txt`, and a run for each seed.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from acrlpd.config import RLTrainConfig, apply_config_overrides, save_config
from acrlpd.config.command_line import set_max_steps
from acrlpd.config.plan.accelerators import MEMORY_FRACTION
from acrlpd.config.run import LoggingConfig
from acrlpd.runs.directory import CONFIG_FILE, run_directory, saved_steps
from acrlpd.tuning.objective import Objective, ScoreReader

LOG_FILE = "log.txt"
_RUN = "trial"


def shorten(config: RLTrainConfig, steps: int | None, evaluations: int) -> RLTrainConfig:
    """The config as trials train it: at most `steps` updates, judged `evaluations` times, and no baselines."""
    config = config if steps is None else set_max_steps(config, min(steps, config.num_train_steps))
    changes = {
        "training.eval_frequency": math.ceil(config.num_train_steps / evaluations),
        "training.save_frequency": config.num_train_steps,
        "training.early_stopping_patience": 0,
        "evaluation.baselines": (),
        "evaluation.robustness": False,
        "evaluation.num_videos": 0,
        "checkpoints.max_to_keep": 1,
        "checkpoints.keep_period": None,
        "checkpoints.keep_best": False,
    }
    # Nobody is told about a trial but the tuner, which reads metrics.jsonl.
    return dataclasses.replace(apply_config_overrides(config, changes), logging=LoggingConfig())


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the process of a trial ended."""

    code: int  # below 0: minus the signal that ended the process
    cpu_s: float  # of the process and of the processes of its environments
    wall_s: float
    message: str  # what the log says last

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def reason(self) -> str:
        if self.was_killed:
            return "killed by SIGKILL, perhaps because the machine had no memory left"
        return f"exit code {self.code}: {self.message}"


class TrialProcess:
    """The training of one config with several seeds."""

    def __init__(
        self, command: Sequence[str], directory: pathlib.Path, scores: ScoreReader, environment: Mapping[str, str]
    ) -> None:
        """Starts the process; `scores` reads the runs that it makes."""
        self.directory, self.scores, self._begin = directory, scores, time.monotonic()
        with (directory / LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal reaches the tuner alone, which then ends its trials.
            )

    def poll(self) -> Ending | None:
        """How the process ended; None while it runs."""
        before = _children_cpu_s()
        code = self._process.poll()
        return None if code is None else self._ending(code, before)

    def kill(self) -> Ending:
        """Ends the process, and those of its environments, at once."""
        before = _children_cpu_s()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._ending(self._process.wait(), before)

    def _ending(self, code: int, cpu_before: float) -> Ending:
        lines = (self.directory / LOG_FILE).read_text(errors="replace").splitlines()
        said = next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
        first = next((line for line in reversed(lines) if line.startswith("acrlpd: ")), said)
        return Ending(
            code=code,
            cpu_s=_children_cpu_s() - cpu_before,  # the system counts a process when it is waited for
            wall_s=time.monotonic() - self._begin,
            message=first.removeprefix("acrlpd: "),
        )


@dataclasses.dataclass(frozen=True)
class TrialStarter:
    """Starts trials. `program` gets the process id of the tuner and what `acrlpd` gets; it is another one in tests."""

    objective: Objective
    jobs: int
    program: Sequence[str] = (sys.executable, "-m", "acrlpd.tuning.trial_process")

    def start(self, config: RLTrainConfig, seeds: Sequence[int], directory: pathlib.Path) -> TrialProcess:
        """Trains the config in a directory. What an earlier process left there is removed."""
        remove(directory)
        directory.mkdir(parents=True)
        file, place = directory / CONFIG_FILE, str(directory.absolute())
        save_config(apply_config_overrides(config, {"checkpoints.directory": place, "exp_name": _RUN}), file)
        command = [*self.program, str(os.getpid()), "train", "--config", str(file), "--seeds", *map(str, seeds)]
        # Trials that run at the same time share the memory of a GPU.
        share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY_FRACTION / self.jobs:.2f}"} if self.jobs > 1 else {}
        scores = ScoreReader(runs_of_trial(config, seeds, directory), self.objective)
        return TrialProcess(command, directory, scores, share | os.environ)


def runs_of_trial(config: RLTrainConfig, seeds: Sequence[int], directory: pathlib.Path) -> list[pathlib.Path]:
    """Where the runs of a trial lie, as `acrlpd train --seeds` names them."""
    placed = {"checkpoints.directory": str(directory.absolute())}
    return [run_directory(apply_config_overrides(config, placed, exp_name=f"{_RUN}-seed{seed}")) for seed in seeds]


def remove(directory: pathlib.Path) -> None:
    """Removes the directory of a trial. A process that was just killed may still write its last file there."""
    for _ in range(5):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.2)
    shutil.rmtree(directory)


def remove_checkpoints(directory: pathlib.Path) -> None:
    """Makes the directory of a trial small: metrics, evaluations and log stay."""
    for run in directory.glob(f"*/{_RUN}-seed*"):
        for step in saved_steps(run):
            shutil.rmtree(run / str(step))


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
