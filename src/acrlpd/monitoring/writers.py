"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases.

A package that is missing is an error before the run starts. A failure later is reported once and never stops training.
"""

import contextlib
import importlib.util
import logging
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from acrlpd.config import ConfigError, RLTrainConfig, to_dict
from acrlpd.installation import install_command

logger = logging.getLogger(__name__)

TENSORBOARD_DIRECTORY = "tensorboard"
WANDB_ID_FILE = "wandb_run_id.txt"


class Writers:
    """All writers of a config. They are opened when the run starts to train, and no failure reaches the caller."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path, *, enabled: bool = True) -> None:
        """Only the primary process of a run has its writers enabled.

        Every process refuses a config whose packages are missing: if one failed alone, the others would wait for it.
        """
        wanted = {
            "tensorboardX": (rl_config.logging.tensorboard, "logging.tensorboard", "tensorboard"),
            "wandb": (rl_config.logging.wandb != "disabled", f"logging.wandb {rl_config.logging.wandb}", "wandb"),
        }
        for package, (is_wanted, setting, extra) in wanted.items():
            if is_wanted and importlib.util.find_spec(package) is None:
                raise ConfigError(f"{setting} needs the package {package}: {install_command(extra)}, or turn it off")
        self._failed: set[str] = set()
        self._writers: dict[str, TensorBoardWriter | WandbWriter] = {}
        self._waiting: dict[str, Callable[[int], TensorBoardWriter | WandbWriter]] = {}
        if enabled and rl_config.logging.tensorboard:
            path = directory / TENSORBOARD_DIRECTORY
            self._waiting["TensorBoard"] = lambda after_step: TensorBoardWriter(path, after_step)
        if enabled and rl_config.logging.wandb != "disabled":
            self._waiting["Weights & Biases"] = lambda _: WandbWriter(rl_config, directory)

    def open(self, after_step: int) -> None:
        """Opens the writers that are not open yet, for a run that goes on after `after_step`."""
        while self._waiting:
            name, create = self._waiting.popitem()
            with self._outlived(name):
                self._writers[name] = create(after_step)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes the finite numbers of a line of metrics."""
        found = ((name, value) for name, value in line.items() if isinstance(value, float))
        # Dashboards group metrics by the part of the name before the slash.
        numbers = {name if "/" in name else f"train/{name}": value for name, value in found}
        for name, writer in self._writers.items():
            with self._outlived(name):
                writer.write(int(line["step"]), numbers)

    def alert(self, title: str, text: str, severity: str) -> None:
        """Tells Weights & Biases about trouble, or about the end of the run."""
        for name, writer in self._writers.items():
            if isinstance(writer, WandbWriter):
                with self._outlived(name):
                    writer.alert(title, text, severity)

    def close(self) -> None:
        for name, writer in self._writers.items():
            with self._outlived(name):
                writer.close()
        self._writers = {}

    @contextlib.contextmanager
    def _outlived(self, name: str) -> Iterator[None]:
        """The run outlives every error of a writer: other people's code and networks fail in many ways."""
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                reason = f"{type(error).__name__}: {error}"
                logger.warning("%s does not take metrics (%s); the run goes on, metrics.jsonl has them", name, reason)
            self._failed.add(name)


class TensorBoardWriter:
    """Event files, one event per line of metrics.

    tensorboardX's own SummaryWriter hands events to a thread through a short queue. When that thread dies of a full
    disk, the next event waits forever. This class writes the records itself, so that an error is raised here.
    """

    def __init__(self, directory: pathlib.Path, after_step: int) -> None:
        """After a restart, TensorBoard forgets what the interrupted run wrote after `after_step`."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        is_restart = directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(directory / "events"), f".{uuid.uuid4().hex[:8]}")
        if is_restart:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._file.write_event(self._event(wall_time=time.time(), step=after_step + 1, session_log=restart))
        self._file.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=numbers))
        self._file.write_event(event)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbWriter:
    """A run at Weights & Biases. Its id is kept in the run directory, so a restart goes on with the same run."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
        import wandb

        id_path = directory / WANDB_ID_FILE
        if not id_path.exists():
            id_path.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=rl_config.logging.project_name,
            name=rl_config.exp_name,
            id=id_path.read_text().strip(),
            resume="allow",
            dir=directory,
            mode=rl_config.logging.wandb,
            config=to_dict(rl_config),
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",  # Several runs may train in this process; each has its own run at W&B.
        )
        # Our own step metric: a restart logs some steps again, which W&B's own counter would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if rl_config.logging.wandb == "online":
            logger.info("Weights & Biases: %s", self._run.url)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def alert(self, title: str, text: str, severity: str) -> None:
        self._run.alert(title, text, level={"info": "INFO", "warning": "WARN", "error": "ERROR"}[severity])

    def close(self) -> None:
        self._run.finish()
