"""What the trials of the soak share: arguments, progress, the violation that ends a trial, and runs as processes.

A trial is a script of this folder. It draws all of its chances from `--seed`, and it stops at the first violation with
the command that repeats it. The configs, the toy environments and the comparison of two runs are those of the tests.
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

REPOSITORY = pathlib.Path(__file__).parents[2]
TESTS = REPOSITORY / "tests"
HELPERS = [str(TESTS / room) for room in ("training", "envs", "serving")]
sys.path += HELPERS
# The programs are tiny: compiling them quickly saves more time than running them slowly costs. Every process of a
# trial has the same flags, because only the same programs compute the same bits.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

from training_helpers import arrays_of, assert_equal_arrays, metrics_of

from acrlpd.config import RLTrainConfig, save_config
from acrlpd.files import LOCK
from acrlpd.runs.directory import read_summary, run_directory
from acrlpd.training.online.records import REPLAY

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step that it takes.
# The longest time that a process may take, however busy the machine is. Reaching this limit counts as hanging.
PATIENCE_S = 900.0


class ViolationError(AssertionError):
    """The trial has found something that must not happen."""


def check(holds: object, message: str) -> None:
    if not holds:
        raise ViolationError(message)


class Trial:
    """One script of the soak: its chances, its directory, its progress, and the rows of its results."""

    def __init__(self, name: str, options: argparse.Namespace, directory: pathlib.Path) -> None:
        self.name = name
        self.options = options
        self.directory = directory
        self.rng = random.Random(options.seed)
        self.rows: list[dict[str, str]] = []
        self.commit = commit()
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {self.name}: {text}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def held(self, what: str, how_often: str, result: str) -> None:
        """Adds a row to the results: what was done, how often, and what held."""
        self.rows.append({"what": what, "how_often": how_often, "result": result})
        self.say(f"{what}; {how_often}: {result}")


@contextlib.contextmanager
def soak_trial(name: str, description: str | None, **defaults: float) -> Iterator[Trial]:
    """Runs the body as a trial whose options are `defaults`, and writes its rows to `--results`.

    A violation ends the process with exit code 1. The directory of a trial that has failed stays.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="default: another one every time")
    parser.add_argument("--results", type=pathlib.Path, help="folder for the rows of the results, as JSON")
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", type=type(default), default=default, help=f"default: {default}")
    options = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"soak-{name}-"))
    trial = Trial(name, options, directory)
    trial.say(f"seed {options.seed}, in {directory}")
    problem: str | None = None
    try:
        yield trial
    except AssertionError as error:
        problem = str(error)
    finally:
        for process in Process.started:
            process.end()
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        content = {"seed": options.seed, "seconds": trial.seconds, "commit": trial.commit, "violation": problem}
        (options.results / f"{name}.json").write_text(json.dumps(content | {"rows": trial.rows}, indent=2))
    if problem is None:
        shutil.rmtree(directory)
        return
    again = " ".join(f"--{option} {getattr(options, option)}" for option in ("seed", *defaults))
    trial.say(f"VIOLATION: {problem}\nthe files are in {directory}; repeat with: {sys.argv[0]} {again}")
    sys.exit(1)


def commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def machine() -> str:
    import jax

    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {os.sysconf('SC_PHYS_PAGES') * 4096 / 2**30:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, jax {jax.__version__}, no GPU"
    )


class Process:
    """A process with a log file, and everything that it has started: they share a process group."""

    started: ClassVar[list["Process"]] = []

    def __init__(self, command: list[str], log: pathlib.Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self.pid = self._process.pid
        self.started.append(self)

    @property
    def said(self) -> str:
        """What the process has written so far, without what processes before it wrote to the same log."""
        return self.log.read_bytes()[self._start :].decode(errors="replace")

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit code. A process that does not end is a violation; its group is killed."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            raise ViolationError(
                f"process {self.pid} did not end within {seconds:.0f} s; its log is {self.log}"
            ) from None

    def end(self) -> None:
        """Ends the process and its children if it still runs; the number of one that has ended may be another's."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def kill(self) -> None:
        """kill -9 for the process, and nothing for its children; they have to notice within a minute."""
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + 60
        while self._group_exists():
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise ViolationError(f"children of {self.pid} still ran a minute after it was killed")
            time.sleep(0.05)

    def _group_exists(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def environment(trial: Trial, **changes: str) -> dict[str, str]:
    """The environment of the processes of a trial, which share one compilation cache."""
    path = [*HELPERS, str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(trial.directory / "xla_cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **changes,
    }


def acrlpd(*arguments: object) -> list[str]:
    """The command line of `acrlpd`."""
    return [sys.executable, "-m", "acrlpd.cli.main", *map(str, arguments)]


class Run:
    """A run of one config, started and resumed with `acrlpd train` as often as a trial likes."""

    def __init__(self, trial: Trial, config: RLTrainConfig, **changes: str) -> None:
        """`changes` are added to the environment of the processes."""
        self.directory = run_directory(config)
        self.log = trial.directory / f"{config.exp_name}.log"
        self.config_file = trial.directory / f"{config.exp_name}.yaml"
        self.environment = environment(trial, **changes)
        save_config(config, self.config_file)

    @property
    def has_begun(self) -> bool:
        """Whether `acrlpd train` asks for --resume, as its message would tell a user."""
        return self.directory.exists() and any(path.name != LOCK for path in self.directory.iterdir())

    def arguments(self, *more: object) -> list[str]:
        resume = ["--resume"] if self.has_begun else []
        return ["train", "--config", str(self.config_file), *resume, *map(str, more)]

    def start(self) -> Process:
        return self.start_with(self.arguments(), self.log)

    def start_with(self, arguments: list[str], log: pathlib.Path) -> Process:
        return Process(acrlpd(*arguments), log, self.environment)

    def finish(self) -> None:
        """Runs to the end, from wherever the run is."""
        process = self.start()
        check(process.wait() == 0, f"the run did not end well; {self.log} ends with:\n{process.said[-3000:]}")

    @property
    def replay(self) -> dict[str, bytes]:
        """Every finished file of the replay."""
        folder = self.directory / REPLAY
        files = sorted(folder.iterdir()) if folder.exists() else []
        return {path.name: path.read_bytes() for path in files if path.suffix != ".tmp"}


def last_step(run: Run) -> int:
    """The step of the newest line of metrics; 0 before the first one."""
    lines = metrics_of(run.directory)
    return lines[-1]["step"] if lines else 0


def check_same_run(found: Run, expected: Run, last_step: int) -> None:
    """Arrays, metrics but for times, every file of the replay, and the outcome are the same to the last bit."""
    check(metrics_of(found.directory) == metrics_of(expected.directory), f"the metrics of {found.directory} differ")
    assert_equal_arrays(arrays_of(found.directory / str(last_step)), arrays_of(expected.directory / str(last_step)))
    check(found.replay == expected.replay, f"the replay of {found.directory} differs")
    outcomes: list[Any] = [
        {name: read_summary(run.directory)[name] for name in ("status", "final_step", "evaluation", "online")}
        for run in (found, expected)
    ]
    check(outcomes[0] == outcomes[1], f"{found.directory}: the summary says {outcomes[0]}, expected {outcomes[1]}")


def compile_shim(trial: Trial, name: str) -> pathlib.Path:
    """The C file `name` of this folder as a library for LD_PRELOAD."""
    library = trial.directory / f"{name}.so"
    source = pathlib.Path(__file__).with_name(f"{name}.c")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", library, source, "-ldl"], check=True)
    except FileNotFoundError:
        sys.exit(f"{trial.name}: this trial needs a C compiler called cc")
    return library
