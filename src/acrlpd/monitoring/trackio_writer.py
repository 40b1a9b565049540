"""A run in trackio: on this machine, unless trackio's own environment variables name a Space or a server."""

import contextlib
import contextvars
import io
import pathlib
import uuid
from collections.abc import Mapping

from acrlpd.config import RLTrainConfig, to_dict
from acrlpd.config.tree import flatten
from acrlpd.monitoring.judged_episodes import JudgedEpisodes

TRACKIO_RUN_FILE = "trackio_run.txt"


class TrackioWriter:
    """A run that a restart goes on with: its name, which is its only identity, is kept in the run directory."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
        import trackio

        name_path = directory / TRACKIO_RUN_FILE
        if not name_path.exists():
            name_path.write_text(f"{rl_config.exp_name}-{uuid.uuid4().hex[:6]}")
        self._table, self._video = trackio.Table, trackio.Video
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
        table = self._table(columns=list(episodes.columns), data=[list(row) for row in episodes.rows])
        videos = {f"videos/{i}": self._video(str(path), caption=path.stem) for i, path in enumerate(episodes.videos)}
        self._run.log({"eval/episodes_table": table, **videos}, step=episodes.step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
