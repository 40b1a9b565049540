"""OGBench's play datasets, made as OGBench makes them: the data of the Q-chunking paper.

An episode begins in a random scene. OGBench's planning oracle pursues one random target after another until the
episode has its number of steps. The seed of an episode follows from its number alone, and each episode has a new
simulator, so the number of processes changes nothing. Episodes are stored next to the dataset, one file each, until
all are there, so that a generation that was interrupted continues and ends with the same dataset.

A dataset is `train/` and `validation/`, two LeRobot v3.0 datasets. A row is a state, the action that was taken there,
and what each of OGBench's tasks says about this state.
"""

import dataclasses
import itertools
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from acrlpd.choice import hint
from acrlpd.config.bounds import check_bounds
from acrlpd.console import Console
from acrlpd.cores import usable_cores
from acrlpd.data.sources.source import Feature
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.envs.env import Env, EnvError
from acrlpd.envs.ogbench_env import RAW_STATE, make_play_simulator
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.registry import make_env
from acrlpd.execution.base import Columns
from acrlpd.experts.ogbench import make_oracle
from acrlpd.experts.ogbench_files import read_play_file, split_episodes, validation_file
from acrlpd.experts.ogbench_rewards import Rows, task_columns
from acrlpd.experts.unfinished import partial_directory, require_equal_settings, settings_text
from acrlpd.files import write_atomically, write_text_atomically

# Environment -> training episodes of OGBench's dataset.
NUM_EPISODES = {
    "cube-single": 1000,
    "cube-double": 1000,
    "cube-triple": 3000,
    "cube-quadruple": 1000,
    "scene": 1000,
    "puzzle-3x3": 1000,
    "puzzle-4x4": 1000,
}
# Bounds between which the probability of a target on top of another cube is drawn for each episode.
_STACKING = {"cube-double": (0.0, 0.25), "cube-triple": (0.05, 0.35), "cube-quadruple": (0.1, 0.5)}
# How OGBench stores its arrays; rewards are computed from the stored numbers.
_DTYPES = {"terminals": np.bool_, "button_states": np.int64}
# The settings of a dataset, stored beside `train/` and `validation/`.
SETTINGS_FILE = "play.json"


@dataclasses.dataclass(frozen=True)
class PlaySettings:
    """What a dataset is made from; equal settings give equal datasets."""

    # OGBench's name without "-play-v0".
    env: str
    # Training episodes; a tenth as many are added for validation. None: as many as OGBench's dataset has.
    num_episodes: Annotated[int | None, Ge(1)] = None
    episode_steps: Annotated[int, Ge(2)] = 1001
    seed: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        for finding in check_bounds(self):
            raise EnvError(finding.message)
        require_play_env(self.env)

    @property
    def splits(self) -> dict[str, int]:
        """The episodes of `train` and `validation`."""
        train = self.num_episodes or NUM_EPISODES[self.env]
        return {"train": train, "validation": max(1, train // 10)}

    def seed_of(self, episode: int, attempt: int) -> int:
        return int(np.random.SeedSequence([self.seed, episode, attempt]).generate_state(1)[0])


@dataclasses.dataclass(frozen=True)
class ImportSettings:
    """A dataset that comes from OGBench's own files."""

    env: str
    # Name of the file with the training episodes.
    imported: str


def require_play_env(env: str) -> None:
    if env not in NUM_EPISODES:
        raise EnvError(
            f"there is no play dataset of {env!r}{hint(env, NUM_EPISODES)}; expected one of {', '.join(NUM_EPISODES)}"
        )


def generate_play(
    settings: PlaySettings,
    output: str | Path,
    *,
    num_workers: int | None = None,
    timeout_s: float = 600.0,
    show_progress: bool = True,
) -> None:
    """Makes the dataset in the directory `output`, or continues an earlier call that was interrupted."""
    output = Path(output)
    if _is_finished(output, settings):
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
        with EnvPool(env.name, 2 * max(1, workers), num_workers=workers, timeout_s=timeout_s) as envs:
            episodes = map(_load_columns, _record_all(envs, settings, files))
            _write_datasets(output, env, settings, settings.splits, episodes, show_progress)
        shutil.rmtree(directory)


def import_play(env: str, path: str | Path, output: str | Path, *, show_progress: bool = True) -> None:
    """Makes the dataset in the directory `output` from OGBench's file and the validation file beside it."""
    require_play_env(env)
    path, output = Path(path), Path(output)
    settings = ImportSettings(env, path.name)
    if _is_finished(output, settings):
        return
    with partial_directory(output, "importing this dataset"):
        task_env = _make_task_env(env)
        files = {"train": path, "validation": validation_file(path)}
        rows = {split: read_play_file(file, task_env) for split, file in files.items()}
        splits = {split: int(arrays["terminals"].sum()) for split, arrays in rows.items()}
        episodes = (_columns(task_env, episode) for arrays in rows.values() for episode in split_episodes(arrays))
        _write_datasets(output, task_env, settings, splits, episodes, show_progress)


def play_episode(env: str, kind: str, steps: int, seed: int) -> Rows:
    """One episode under OGBench's names and in its types: states before the actions, and the actions."""
    simulator = make_play_simulator(env, kind)
    np.random.seed(seed)  # noqa: NPY002 (the oracles draw from numpy's global generator)
    observation, _ = simulator.reset(seed=seed)
    p_stack = np.random.uniform(*_STACKING.get(env, (0.0, 0.0)))  # noqa: NPY002
    rows: dict[str, list[Any]] = defaultdict(list)
    oracle = None
    for step in range(steps):
        if oracle is None or oracle.done:
            if oracle is not None:
                simulator.set_new_target(return_info=False, p_stack=p_stack)
            info = simulator.compute_ob_info()
            oracle = make_oracle(simulator, "plan", info["privileged/target_task"])
            oracle.reset(None, info)
        action = np.clip(oracle.select_action(None, simulator.compute_ob_info()), -1, 1)
        rows["observations"].append(observation)
        rows["actions"].append(action)
        rows["terminals"].append(step == steps - 1)
        rows["qpos"].append(simulator.data.qpos.copy())
        rows["qvel"].append(simulator.data.qvel.copy())
        if kind != "cube":
            rows["button_states"].append(simulator._cur_button_states.copy())
        observation, *_ = simulator.step(action)
    return {name: np.array(values, _DTYPES.get(name, np.float32)) for name, values in rows.items()}


def is_healthy(rows: Rows) -> bool:
    """Whether the cube of the scene stays where the camera sees it or the drawer holds it, as OGBench demands."""
    _, y, z = rows["qpos"][:, 14:17].T
    is_lost = (y >= 0.29) | ((y <= -0.3) & ((z < 0.06) | (z > 0.08)))
    return not is_lost.any()


def record_episode(env: Env, settings: PlaySettings, number: int, file: Path) -> None:
    """Plays an episode and stores its columns; in the scene, an episode that is not healthy is played again."""
    kind = env.env.kind
    for attempt in itertools.count():
        rows = play_episode(settings.env, kind, settings.episode_steps, settings.seed_of(number, attempt))
        if kind != "scene" or is_healthy(rows):
            break
    columns = _columns(env, rows)
    write_atomically(file, lambda stream: np.savez(stream, **columns))  # type: ignore[arg-type]


def _record_all(envs: EnvPool, settings: PlaySettings, files: list[Path]) -> Iterator[Path]:
    """The files of all episodes, each as soon as it and those before it are there; missing ones are recorded."""
    missing = iter([number for number, file in enumerate(files) if not file.exists()])
    running: dict[int, int] = {}  # slot -> episode
    failed: set[int] = set()

    def submit(slot: int, number: int | None) -> None:
        if number is not None:
            running[slot] = number
            envs.submit(slot, record_episode, settings, number, files[number])

    for slot in range(envs.num_envs):
        submit(slot, next(missing, None))
    for file in files:
        while not file.exists():
            slot, result = envs.next_result()
            number = running.pop(slot)
            if not isinstance(result, EnvFailure):
                submit(slot, next(missing, None))
            elif number not in failed:
                failed.add(number)
                submit(slot, number)
            else:
                raise EnvError(
                    f"episode {number} of {settings.env} failed twice: {result.reason}. The same command goes on "
                    "with the episodes that are there"
                )
        yield file


def _load_columns(file: Path) -> Columns:
    with np.load(file, allow_pickle=False) as columns:
        return dict(columns)


def _make_task_env(env: str) -> Env:
    return make_env(f"{env}-play-singletask-v0")


def _columns(env: Env, rows: Rows) -> Columns:
    columns = {RAW_STATE: rows["observations"], env.spec.action_column: rows["actions"]}
    return columns | task_columns(env.env, rows)


def _is_finished(output: Path, settings: Any) -> bool:
    """Whether the dataset is there already; a dataset of other settings is refused."""
    file = output / SETTINGS_FILE
    if file.is_file():
        require_equal_settings(file, settings, "a dataset")
    return file.is_file()


def _write_datasets(
    output: Path, env: Env, settings: Any, splits: Mapping[str, int], episodes: Iterable[Columns], show_progress: bool
) -> None:
    """Writes `train/` and `validation/`; the directory gets its name when both are complete."""
    writing = output.with_name(output.name + ".writing")
    shutil.rmtree(writing, ignore_errors=True)
    features = {RAW_STATE: env.spec.features[RAW_STATE]}
    features[env.spec.action_column] = Feature("float32", (env.spec.action_dim,))
    for task in range(1, len(env.env.task_infos) + 1):
        features |= {f"task{task}.reward": Feature("float32", ()), f"task{task}.success": Feature("bool", ())}
    episodes = iter(episodes)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as bar:
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
    if output.exists():
        output.rmdir()  # the directory is empty; others were refused before
    writing.replace(output)
