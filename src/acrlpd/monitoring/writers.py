"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases and trackio.

Each gets the config, the numbers, and of every evaluation a table of the episodes and the films. A package that is
missing is an error before the run starts. A failure later is reported once and never stops training.
"""

import contextlib
import contextvars
import importlib.util
import io
import logging
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

from acrlpd.config import ConfigError, RLTrainConfig, to_dict
from acrlpd.config.tree import flatten
from acrlpd.installation import install_command
from acrlpd.monitoring.judged_episodes import JudgedEpisodes, read_judged_episodes, to_gif
from acrlpd.runs.metrics_log import EVALUATION

logger = logging.getLogger(__name__)

TENSORBOARD_DIRECTORY = "tensorboard"
WANDB_ID_FILE = "wandb_run_id.txt"
TRACKIO_RUN_FILE = "trackio_run.txt"


class Writer(Protocol):
    """One place where metrics go."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def write_episodes(self, episodes: JudgedEpisodes) -> None: ...
    def close(self) -> None: ...


class Writers:
    """All writers of a config. They are opened when the run starts to train, and no failure reaches the caller."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path, *, enabled: bool = True) -> None:
        """Only the primary process of a run has its writers enabled.

        Every process refuses a config whose packages are missing: if one failed alone, the others would wait for it.
        """
        wanted = {
            "tensorboardX": (rl_config.logging.tensorboard, "logging.tensorboard", "tensorboard"),
            "wandb": (rl_config.logging.wandb != "disabled", f"logging.wandb {rl_config.logging.wandb}", "wandb"),
            "trackio": (rl_config.logging.trackio, "logging.trackio", "trackio"),
        }
        for package, (is_wanted, setting, extra) in wanted.items():
            if is_wanted and importlib.util.find_spec(package) is None:
                raise ConfigError(f"{setting} needs the package {package}: {install_command(extra)}, or turn it off")
        self._directory = directory
        self._failed: set[str] = set()
        self._writers: dict[str, Writer] = {}
        self._waiting: dict[str, Callable[[int], Writer]] = {}
        if enabled and rl_config.logging.tensorboard:
            path = directory / TENSORBOARD_DIRECTORY
            self._waiting["TensorBoard"] = lambda after_step: TensorBoardWriter(rl_config, path, after_step)
        if enabled and rl_config.logging.wandb != "disabled":
            self._waiting["Weights & Biases"] = lambda _: WandbWriter(rl_config, directory)
        if enabled and rl_config.logging.trackio:
            self._waiting["trackio"] = lambda _: TrackioWriter(rl_config, directory)

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
        step = int(line["step"])
        for name, writer in self._writers.items():
            with self._outlived(name):
                writer.write(step, numbers)
        if self._writers and any(name.startswith(EVALUATION) for name in line):
            self._write_episodes(step)

    def _write_episodes(self, step: int) -> None:
        """The evaluation has left its record in the run directory before its numbers come here."""
        episodes = None
        with self._outlived("the table of the episodes"):
            episodes = read_judged_episodes(self._directory, step)
        if episodes is not None:
            for name, writer in self._writers.items():
                with self._outlived(name):
                    writer.write_episodes(episodes)

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

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path, after_step: int) -> None:
        """After a restart, TensorBoard forgets what the interrupted run wrote after `after_step`."""
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary, self._make_text = event_pb2.Event, summary_pb2.Summary, summary.text
        is_restart = directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(directory / "events"), f".{uuid.uuid4().hex[:8]}")
        if is_restart:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._file.write_event(self._event(wall_time=time.time(), step=after_step + 1, session_log=restart))
        # What the tab of hyperparameters shows: numbers, texts and switches, and the success rate beside them.
        settings = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flatten(to_dict(rl_config))
        }
        experiment, session, _ = summary.hparams(settings, {f"{EVALUATION}success_rate": 0})
        self._write(0, experiment)
        self._write(0, session)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, self._summary(value=numbers))

    def write_episodes(self, episodes: JudgedEpisodes) -> None:
        self._write(episodes.step, self._make_text(f"{EVALUATION}episodes_table", episodes.to_markdown()))
        for i, video in enumerate(episodes.videos):
            content, (width, height) = to_gif(video)
            picture = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
            self._write(episodes.step, self._summary(value=[self._summary.Value(tag=f"videos/{i}", image=picture)]))

    def _write(self, step: int, summary: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
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
        self._wandb = wandb

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def alert(self, title: str, text: str, severity: str) -> None:
        self._run.alert(title, text, level={"info": "INFO", "warning": "WARN", "error": "ERROR"}[severity])

    def write_episodes(self, episodes: JudgedEpisodes) -> None:
        self._run.log({"step": episodes.step, **_table_and_films(self._wandb, episodes, format="mp4")})

    def close(self) -> None:
        self._run.finish()


class TrackioWriter:
    """A run in trackio: on this machine, unless trackio's own environment variables name a Space or a server.

    The name of the run is its only identity, and is kept in the run directory, so a restart goes on with the same run.
    """

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
        import trackio

        name_path = directory / TRACKIO_RUN_FILE
        if not name_path.exists():
            name_path.write_text(f"{rl_config.exp_name}-{uuid.uuid4().hex[:6]}")
        self._trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # trackio greets on stdout
            # In a context of its own, because a second run in the same context would end the first run.
            self._run = contextvars.Context().run(
                trackio.init,
                project=rl_config.logging.project_name,
                name=name_path.read_text().strip(),
                group=rl_config.name,
                config=dict(flatten(to_dict(rl_config))),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,  # metrics.jsonl has the memory of the devices
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def write_episodes(self, episodes: JudgedEpisodes) -> None:
        self._run.log(_table_and_films(self._trackio, episodes), step=episodes.step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


def _table_and_films(package: ModuleType, episodes: JudgedEpisodes, **of_films: Any) -> dict[str, Any]:
    """The episodes of an evaluation, by the names of charts; wandb and trackio call their classes alike."""
    table = package.Table(columns=list(episodes.columns), data=[list(row) for row in episodes.rows])
    films = [package.Video(str(path), caption=path.stem, **of_films) for path in episodes.videos]
    return {f"{EVALUATION}episodes_table": table, **{f"videos/{i}": film for i, film in enumerate(films)}}
