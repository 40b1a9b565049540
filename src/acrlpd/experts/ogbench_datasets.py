"""Play datasets of OGBench, the data of the Q-chunking paper: generated here, or imported from OGBench's files.

A dataset is `train/` and `validation/`, two LeRobot v3.0 datasets. A row is a state, the action that was taken there,
and what each of OGBench's tasks says about this state.

The seed of an episode follows from its number alone, and each episode has a new simulator, so the number of processes
changes nothing. Episodes are stored next to the dataset, one file each, until all are there, so that a generation that
was interrupted continues and ends with the same dataset.
"""

import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge
from rich.progress import MofNCompleteColumn

from acrlpd.choice import hint
from acrlpd.config.bounds import require_bounds
from acrlpd.console import progress
from acrlpd.cores import usable_cores
from acrlpd.data.sources.source import Feature
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.envs.env import Env, EnvError
from acrlpd.envs.ogbench_env import RAW_STATE
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.registry import make_env
from acrlpd.execution.base import Columns
from acrlpd.experts.ogbench_files import read_play_file, split_episodes, validation_file
from acrlpd.experts.ogbench_play import play_columns, record_episode
from acrlpd.experts.unfinished import partial_directory, require_equal_settings, settings_text
from acrlpd.files import new_directory, read_json_object, write_text_atomically

# Environment -> training episodes of OGBench's dataset.
_NUM_EPISODES = {
    "cube-single": 1000,
    "cube-double": 1000,
    "cube-triple": 3000,
    "cube-quadruple": 5000,
    "scene": 1000,
    "puzzle-3x3": 1000,
    "puzzle-4x4": 1000,
}
# Longest time of an episode; then its process is killed.
_EPISODE_TIMEOUT_S = 600.0
# The settings of a dataset, stored beside `train/` and `validation/`.
SETTINGS_FILE = "play.json"


@dataclasses.dataclass(frozen=True)
class PlaySettings:
    """What a generated dataset is; equal settings give equal datasets."""

    # OGBench's name without "-play-v0".
    env: str
    # Training episodes; a tenth as many are added for validation.
    num_episodes: Annotated[int, Ge(1)]
    episode_steps: Annotated[int, Ge(2)] = 1001
    seed: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require_bounds(self, error_type=EnvError)
        ogbench_episodes(self.env)

    @property
    def splits(self) -> dict[str, int]:
        """The episodes of `train` and `validation`."""
        return {"train": self.num_episodes, "validation": max(1, self.num_episodes // 10)}


@dataclasses.dataclass(frozen=True)
class ImportSettings:
    """A dataset that comes from OGBench's own files."""

    env: str
    # Name of the file with the training episodes.
    imported: str


def ogbench_episodes(env: str) -> int:
    """How many training episodes OGBench's own dataset has; refuses an environment without such a dataset."""
    if env not in _NUM_EPISODES:
        known = ", ".join(_NUM_EPISODES)
        raise EnvError(f"OGBench has no play dataset of {env!r}; expected one of {known}{hint(env, _NUM_EPISODES)}")
    return _NUM_EPISODES[env]


def require_play_of(env_id: str, data_dir: Path) -> None:
    """Refuses a play dataset that was recorded in another environment, whose states may have the same width."""
    file = data_dir.parent / SETTINGS_FILE
    if not file.is_file():
        return
    recorded = read_json_object(file).get("env")
    if not env_id.removeprefix("visual-").startswith(f"{recorded}-"):
        raise EnvError(
            f"{data_dir} is play in {recorded} ({file}), but env.id is {env_id}: choose the data of that environment, "
            "or make it with `acrlpd data ogbench`"
        )


def generate_play(
    settings: PlaySettings,
    output: str | Path,
    *,
    num_workers: int | None = None,
    show_progress: bool = True,
) -> None:
    """Makes the dataset in the directory `output`, or continues an earlier call that was interrupted.

    A dataset of the same settings that is complete stays as it is.
    """
    output = Path(output)
    if (output / SETTINGS_FILE).is_file():
        require_equal_settings(output / SETTINGS_FILE, settings, "a dataset")
        return
    with partial_directory(output, "generating this dataset") as directory:
        total = sum(settings.splits.values())
        files = [directory / f"episode-{number:06d}.npz" for number in range(total)]
        if any(file.exists() for file in files):
            require_equal_settings(directory / SETTINGS_FILE, settings, "an unfinished dataset")
        write_text_atomically(directory / SETTINGS_FILE, settings_text(settings))
        env = _make_task_env(settings.env)
        workers = usable_cores() if num_workers is None else num_workers
        # With two environments per process, the next call is there already when a process ends an episode.
        with EnvPool(env.name, 2 * max(1, workers), num_workers=workers, timeout_s=_EPISODE_TIMEOUT_S) as envs:
            episodes = map(_load_columns, _record_all(envs, settings, files))
            _write_datasets(output, env, settings, settings.splits, episodes, show_progress)
        shutil.rmtree(directory)


def import_play(env: str, path: str | Path, output: str | Path) -> None:
    """Makes the dataset in the directory `output` from OGBench's file and the validation file beside it."""
    ogbench_episodes(env)
    path, output = Path(path), Path(output)
    with partial_directory(output, "importing this dataset"):
        task_env = _make_task_env(env)
        files = {"train": path, "validation": validation_file(path)}
        rows = {split: read_play_file(file, task_env) for split, file in files.items()}
        splits = {split: int(np.count_nonzero(arrays["terminals"])) for split, arrays in rows.items()}
        episodes = (play_columns(task_env, episode) for arrays in rows.values() for episode in split_episodes(arrays))
        _write_datasets(output, task_env, ImportSettings(env, path.name), splits, episodes)


def _record_all(envs: EnvPool, settings: PlaySettings, files: list[Path]) -> Iterator[Path]:
    """The files of all episodes, each as soon as it and those before it are there; missing ones are recorded."""
    missing = [number for number, file in enumerate(files) if not file.exists()]
    calls = (
        (record_episode, settings.env, settings.episode_steps, settings.seed, number, files[number])
        for number in missing
    )
    recorded = dict.fromkeys(missing, envs.run_in_order(calls))
    for number, file in enumerate(files):
        if number in recorded and isinstance(result := next(recorded[number]), EnvFailure):
            raise EnvError(
                f"episode {number} of {settings.env} failed twice: {result.reason}. The same command goes on with the "
                "episodes that are there"
            )
        yield file


def _load_columns(file: Path) -> Columns:
    with np.load(file, allow_pickle=False) as columns:
        return dict(columns)


def _make_task_env(env: str) -> Env:
    return make_env(f"{env}-play-singletask-v0")


def _write_datasets(
    output: Path,
    env: Env,
    settings: PlaySettings | ImportSettings,
    splits: Mapping[str, int],
    episodes: Iterable[Columns],
    show_progress: bool = True,
) -> None:
    """Writes `train/` and `validation/`; the directory gets its name when both are complete."""
    features = {RAW_STATE: env.spec.features[RAW_STATE]}
    features[env.spec.action_column] = Feature("float32", (env.spec.action_dim,))
    for task in range(1, len(env.env.task_infos) + 1):
        features |= {f"task{task}.reward": Feature("float32", ()), f"task{task}.success": Feature("bool", ())}
    episodes = iter(episodes)
    with new_directory(output) as writing, progress(MofNCompleteColumn(), disable=not show_progress) as bar:
        task_id = bar.add_task(f"{settings.env} episodes", total=sum(splits.values()))
        for split, count in splits.items():
            with LeRobotWriter(
                writing / split, fps=env.spec.fps, features=features, robot_type=env.spec.robot_type
            ) as writer:
                for episode in itertools.islice(episodes, count):
                    writer.add_steps(episode, {})
                    writer.end_episode(env.prompt)
                    bar.advance(task_id)
        write_text_atomically(writing / SETTINGS_FILE, settings_text(settings))
