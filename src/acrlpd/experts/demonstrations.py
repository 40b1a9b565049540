"""Demonstrations by scripted experts, as a LeRobot v3.0 dataset with rewards.

Every episode is a candidate with a number; its seed, its quality and whether it is kept follow from that
number and the settings alone. Kept episodes lie one file each next to the dataset until all are there, so
a collection that was interrupted goes on where it stopped and ends with the same dataset.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.envs.env import EnvSpec
from acrlpd.envs.episodes import Rollout, demonstrate, rollout_features
from acrlpd.envs.errors import EnvError
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.registry import IMAGE_SIZE
from acrlpd.files import LOCK, only_one

# Candidates per wanted episode after which a share of successes is called out of reach.
_MAX_CANDIDATES_PER_EPISODE = 20
# Candidates that may fail (crash, hang) before the collection gives up.
_MAX_FAILED = 10
# At once; finished episodes with images take 100 MB each until it is their turn.
_MAX_ENVS = 16
_SETTINGS_FILE = "settings.json"

# For people: which environments have an expert, and what its qualities are.
EXPERTS = {
    "[visual-]cube-*, scene-*, puzzle-* (OGBench)": {
        "expert": "smooth, and does the task",
        "noisy": "does the task with strong noise on every action",
        "mixed": "noisy, and does the task in 35 % of the episodes, something else in the others",
        "play": "smooth, with every third goal or so that of the task",
    },
    "gym_aloha/AlohaTransferCube-v0": {
        "expert": "smooth, and hands the cube over",
        "noisy": "hands the cube over with noise on every joint",
        "mixed": "noisy, and reaches for the cube in half of the episodes, beside it in the others",
    },
}


@dataclasses.dataclass(frozen=True)
class DemonstrationSettings:
    """What a collection is; two collections with equal settings give equal datasets."""

    # Name of the environment.
    env: str
    # Episodes in the dataset.
    num_episodes: int
    # Quality of the expert -> its share of the candidates; an environment's experts know several.
    mix: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"expert": 1.0})
    # Share of the episodes that are to be successes; None: as they come.
    success_share: float | None = None
    seed: int = 0
    # Steps after which an episode is cut; None: the environment's own limit.
    max_episode_steps: int | None = None
    image_size: tuple[int, int] = IMAGE_SIZE
    # Encoder of the cameras' videos.
    codec: str = "h264"

    def __post_init__(self) -> None:
        if self.num_episodes < 1:
            raise EnvError(f"num_episodes must be at least 1; found {self.num_episodes}")
        if self.seed < 0:
            raise EnvError(f"seed must be at least 0; found {self.seed}")
        shares = self.mix.values()
        if not all(0 <= share < math.inf for share in shares) or not sum(shares) > 0:
            raise EnvError(f"mix must give qualities and their shares, such as {{'expert': 1}}; found {dict(self.mix)}")
        if self.success_share is not None and not 0 <= self.success_share <= 1:
            raise EnvError(f"success_share must lie in [0, 1]; found {self.success_share}")

    def seed_of(self, candidate: int) -> int:
        return int(np.random.SeedSequence([self.seed, candidate]).generate_state(1)[0])

    def quality_of(self, candidate: int) -> str:
        """The quality that is furthest behind its share, counted over all candidates up to this one."""
        total = sum(self.mix.values())
        counts = dict.fromkeys(self.mix, 0)
        chosen = ""
        for number in range(1, candidate + 2):
            chosen = max(counts, key=lambda name: self.mix[name] / total * number - counts[name])
            counts[chosen] += 1
        return chosen


@dataclasses.dataclass(frozen=True)
class Collection:
    """What was collected."""

    path: Path
    num_episodes: int
    num_successes: int
    num_steps: int
    num_candidates: int
    failures: tuple[EnvFailure, ...]


def collect_demonstrations(
    settings: DemonstrationSettings,
    output: str | Path,
    *,
    num_workers: int | None = None,
    timeout_s: float = 300.0,
    show_progress: bool = True,
) -> Collection:
    """Collects a dataset into the directory `output`, which must not exist yet.

    If an earlier call with the same settings was interrupted, goes on from where it was.
    """
    output = Path(output)
    with _only_collector(output) as path:
        with EnvPool(
            settings.env,
            min(os.cpu_count() or 1, _MAX_ENVS),
            num_workers=num_workers,
            image_size=settings.image_size,
            max_episode_steps=settings.max_episode_steps,
            timeout_s=timeout_s,
        ) as envs:
            # What cannot be shown or written is said before anything is played, and leaves nothing behind.
            _check_mix(settings, envs.spec)
            writer = _create_writer(output, settings, envs.spec)
            partial = Partial(path, settings)
            candidates = _candidates(envs, settings, partial.next_candidate)
            with _Progress(settings, partial, show_progress) as progress:
                while not partial.complete:
                    partial.add(*next(candidates))
                    progress.update(partial)
            spec, failures = envs.spec, tuple(envs.failures)
        _write_dataset(output, writer, partial, spec)
        shutil.rmtree(path)
    lengths = [length for _, length in partial.kept.values()]
    return Collection(output, len(lengths), partial.num_successes, sum(lengths), partial.next_candidate, failures)


@contextlib.contextmanager
def _only_collector(output: Path) -> Iterator[Path]:
    """Where episodes lie until all are there; for one process, since two would write over each other's."""
    partial = output.with_name(output.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with only_one(partial, "collecting these demonstrations; wait until it is done", EnvError):
        try:
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise EnvError(f"{output} exists already; choose another directory or remove it")
            yield partial
        finally:
            if partial.exists() and all(path.name == LOCK for path in partial.iterdir()):
                shutil.rmtree(partial)


def write_rollout(writer: LeRobotWriter, rollout: Rollout, spec: EnvSpec) -> int:
    """Appends a recorded episode to a dataset with the features `rollout_features(spec)`."""
    columns = rollout.columns(spec.action_column)
    cameras = {name: columns.pop(name) for name in spec.cameras}
    writer.add_steps(columns, cameras)
    return writer.end_episode(rollout.prompt)


def _check_mix(settings: DemonstrationSettings, spec: EnvSpec) -> None:
    if not spec.qualities:
        raise EnvError(
            f"environment {spec.name!r} has no scripted expert. Those of OGBench and "
            "gym_aloha/AlohaTransferCube-v0 have one"
        )
    unknown = [quality for quality in settings.mix if quality not in spec.qualities]
    if unknown:
        raise EnvError(f"the expert of {spec.name!r} shows {', '.join(spec.qualities)}; found {unknown[0]!r} in mix")


def _candidates(envs: EnvPool, settings: DemonstrationSettings, first: int) -> Iterator[tuple[int, Rollout | None]]:
    """Episodes in the order of their numbers, however long each takes; None for one that failed twice."""
    finished: dict[int, Rollout | None] = {}
    running: dict[int, int] = {}  # slot -> candidate
    upcoming, wanted = first, first
    failed: set[int] = set()

    def submit(slot: int, candidate: int) -> None:
        running[slot] = candidate
        envs.submit(slot, demonstrate, settings.seed_of(candidate), settings.quality_of(candidate))

    while True:
        for slot in range(envs.num_envs):
            # Nobody runs far ahead of a slow one: what is finished waits in memory.
            if slot not in running and upcoming < wanted + 2 * envs.num_envs:
                submit(slot, upcoming)
                upcoming += 1
        slot, result = envs.next_result()
        candidate = running.pop(slot)
        if isinstance(result, EnvFailure):
            if len(failed) >= _MAX_FAILED:
                raise EnvError(f"demonstrations in {settings.env!r} keep failing; the last: {result.reason}")
            if candidate not in failed:
                failed.add(candidate)
                submit(slot, candidate)
                continue
        finished[candidate] = None if isinstance(result, EnvFailure) else result
        while wanted in finished:
            yield wanted, finished.pop(wanted)
            wanted += 1


class Partial:
    """A collection under way: one file per kept episode, and the settings they belong to."""

    def __init__(self, path: Path, settings: DemonstrationSettings) -> None:
        self.path = path
        self.settings = settings
        # candidate -> (success, steps)
        self.kept = {int(p.name.split("-")[1]): self._facts(p) for p in sorted(path.glob("episode-*.npz"))}
        self.next_candidate = max(self.kept, default=-1) + 1
        described = json.loads(json.dumps(dataclasses.asdict(settings)))
        file = path / _SETTINGS_FILE
        if self.kept:
            self._check_settings(described, json.loads(file.read_text()))
        path.mkdir(parents=True, exist_ok=True)
        _write_atomically(file, lambda name: name.write_text(json.dumps(described, indent=2)))

    @property
    def num_successes(self) -> int:
        return sum(success for success, _ in self.kept.values())

    @property
    def complete(self) -> bool:
        return len(self.kept) == self.settings.num_episodes

    def add(self, candidate: int, rollout: Rollout | None) -> None:
        """Keeps the episode if it is still wanted."""
        self.next_candidate = candidate + 1
        if rollout is not None and self._wants(rollout.succeeded):
            name = f"episode-{candidate:08d}-{'success' if rollout.succeeded else 'failure'}-{rollout.length}.npz"
            _write_atomically(self.path / name, lambda temporary: _save_rollout(temporary, rollout))
            self.kept[candidate] = (rollout.succeeded, rollout.length)
        wanted = self.settings.num_episodes
        if self.next_candidate >= _MAX_CANDIDATES_PER_EPISODE * wanted and not self.complete:
            raise EnvError(
                f"after {self.next_candidate} candidates there are {self.num_successes} successes and "
                f"{len(self.kept) - self.num_successes} failures of the {wanted} episodes wanted: a success_share "
                f"of {self.settings.success_share} is out of reach with the mix {dict(self.settings.mix)}"
            )

    def episodes(self) -> Iterator[Rollout]:
        for path in sorted(self.path.glob("episode-*.npz")):
            yield _load_rollout(path)

    def _wants(self, success: bool) -> bool:
        total, share = self.settings.num_episodes, self.settings.success_share
        if share is None:
            return len(self.kept) < total
        successes = round(share * total)
        failures = len(self.kept) - self.num_successes
        return self.num_successes < successes if success else failures < total - successes

    def _check_settings(self, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        different = sorted(key for key in wanted if wanted[key] != found.get(key))
        if different:
            key = different[0]
            raise EnvError(
                f"{self.path} is a collection under way with other settings: {key} was {found.get(key)!r} and is "
                f"{wanted[key]!r}. Remove it to start again"
            )

    def _facts(self, path: Path) -> tuple[bool, int]:
        _, _, outcome, length = path.stem.split("-")
        return outcome == "success", int(length)


def _save_rollout(path: Path, rollout: Rollout) -> None:
    arrays: dict[str, Any] = {
        "seed": rollout.seed,
        "prompt": rollout.prompt,
        "actions": rollout.actions,
        "rewards": rollout.rewards,
        "success": rollout.success,
        "terminated": rollout.terminated,
    }
    arrays |= {f"observation/{name}": values for name, values in rollout.observations.items()}
    # Rendered frames are plain: the lowest level makes files as small, four times as fast as numpy's own.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _load_rollout(path: Path) -> Rollout:
    with np.load(path, allow_pickle=False) as file:
        content = dict(file)
    prefix = "observation/"
    return Rollout(
        seed=int(content["seed"]),
        prompt=str(content["prompt"]),
        actions=content["actions"],
        rewards=content["rewards"],
        success=content["success"],
        terminated=bool(content["terminated"]),
        observations={k.removeprefix(prefix): v for k, v in content.items() if k.startswith(prefix)},
        chunk_steps=np.zeros(0, np.int64),
        values={},
    )


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """A kill leaves either nothing or the whole file."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.replace(path)


def _create_writer(output: Path, settings: DemonstrationSettings, spec: EnvSpec) -> LeRobotWriter:
    """Writes beside `output`; the directory appears with the first episode."""
    writing = output.with_name(output.name + ".writing")
    shutil.rmtree(writing, ignore_errors=True)
    return LeRobotWriter(
        writing,
        fps=spec.fps,
        features=rollout_features(spec),
        robot_type=spec.robot_type,
        codec=settings.codec,
    )


def _write_dataset(output: Path, writer: LeRobotWriter, partial: Partial, spec: EnvSpec) -> None:
    """All episodes into the writer's directory, which gets its name when it is complete."""
    with writer:
        for rollout in partial.episodes():
            write_rollout(writer, rollout, spec)
    if output.exists():
        output.rmdir()  # empty, or it would have been refused
    writer.root.replace(output)


class _Progress:
    """A progress bar with the counts that matter."""

    def __init__(self, settings: DemonstrationSettings, partial: Partial, show: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[outcome]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, disable=not show)
        self._task = self._bar.add_task(settings.env, total=settings.num_episodes, outcome="")
        self.update(partial)

    def update(self, partial: Partial) -> None:
        outcome = f"{partial.num_successes} successes of {partial.next_candidate} tried"
        self._bar.update(self._task, completed=len(partial.kept), outcome=outcome)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
