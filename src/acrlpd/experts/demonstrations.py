"""Datasets of demonstrations by scripted experts: LeRobot v3.0 with rewards.

Experts play numbered candidates. The seed of a candidate, its quality and whether it is kept follow from its number and
the settings alone. Kept episodes are stored next to the dataset, one file each, until all are there, so that a
collection that was interrupted continues and ends with the same dataset.
"""

import dataclasses
import itertools
import math
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated

import numpy as np
from annotated_types import Ge, Interval
from rich.progress import TextColumn

from acrlpd.config.bounds import require_bounds
from acrlpd.console import progress
from acrlpd.cores import usable_cores
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.envs.env import EnvError, EnvSpec
from acrlpd.envs.episodes import Rollout, rollout_features
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.registry import IMAGE_SIZE
from acrlpd.experts.expert import Expert, demonstrate, find_expert
from acrlpd.experts.unfinished import partial_directory, require_equal_settings, settings_text
from acrlpd.files import new_directory, write_atomically, write_text_atomically

# After this many candidates per wanted episode a share of successes counts as out of reach.
_MAX_CANDIDATES_PER_EPISODE = 20
# The collection ends with an error when candidates have crashed or hung more often than this.
_MAX_FAILURES = 20
# Environments at once: an episode with images takes 100 MB of memory until it is stored.
_MAX_ENVS = 16
# Names of the arrays in an episode's file.
_STORED = ("seed", "prompt", "actions", "rewards", "success", "terminated")
_OBSERVATION = "observation/"


@dataclasses.dataclass(frozen=True)
class DemonstrationSettings:
    """What a collection is; two collections with equal settings give equal datasets."""

    # Name of the environment.
    env: str
    # Episodes in the dataset.
    num_episodes: Annotated[int, Ge(1)]
    # Quality of the expert -> its share of the candidates.
    mix: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"expert": 1.0})
    # Share of successes among the episodes of the dataset; None keeps every candidate.
    success_share: Annotated[float | None, Interval(ge=0, le=1)] = None
    seed: Annotated[int, Ge(0)] = 0
    # Steps after which an episode is cut; None means the environment's own limit.
    max_episode_steps: int | None = None
    image_size: tuple[int, int] = IMAGE_SIZE
    # Encoder of the cameras' videos.
    codec: str = "h264"

    def __post_init__(self) -> None:
        require_bounds(self, error_type=EnvError)
        shares = self.mix.values()
        if not all(0 <= share < math.inf for share in shares) or not sum(shares) > 0:
            raise EnvError(f"mix must give qualities and their shares, such as {{'expert': 1}}; found {dict(self.mix)}")

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
    """What was collected, in numbers."""

    path: Path
    episodes: int
    successes: int
    steps: int
    candidates: int
    failures: tuple[str, ...]  # why episodes were lost


def collect_demonstrations(
    settings: DemonstrationSettings,
    output: str | Path,
    *,
    num_workers: int | None = None,
    timeout_s: float = 300.0,
    show_progress: bool = True,
) -> Collection:
    """Collects a dataset into the directory `output`, which must not exist yet.

    If an earlier call with the same settings was interrupted, this call continues it.
    """
    output = Path(output)
    expert = find_expert(settings.env, settings.mix)
    with partial_directory(output, "collecting these demonstrations") as directory:
        with new_directory(output) as writing:
            with EnvPool(
                settings.env,
                min(usable_cores(), _MAX_ENVS),
                num_workers=num_workers,
                image_size=settings.image_size,
                max_episode_steps=settings.max_episode_steps,
                timeout_s=timeout_s,
            ) as envs:
                spec, features = envs.spec, rollout_features(envs.spec)
                # The writer refuses features that a dataset cannot hold, before anything is played or stored.
                writer = LeRobotWriter(
                    writing, fps=spec.fps, features=features, robot_type=spec.robot_type, codec=settings.codec
                )
                partial = _PartialCollection(directory, settings)
                _play(envs, expert, partial, show_progress)
            with writer:
                for rollout in map(_load_rollout, partial.files()):
                    write_rollout(writer, rollout, spec)
        shutil.rmtree(directory)
    return Collection(
        output,
        episodes=len(partial.kept),
        successes=partial.num_successes,
        steps=sum(length for _, length in partial.kept.values()),
        candidates=partial.next_candidate,
        failures=tuple(failure.reason for failure in envs.failures),
    )


def write_rollout(writer: LeRobotWriter, rollout: Rollout, spec: EnvSpec) -> None:
    """Appends a recorded episode to a dataset with the features `rollout_features(spec)`."""
    columns = rollout.columns(spec.action_column)
    cameras = {name: columns.pop(name) for name in spec.cameras}
    writer.add_steps(columns, cameras)
    writer.end_episode(rollout.prompt)


class _PartialCollection:
    """A collection that is not complete: one file per kept episode, and the settings that they belong to."""

    def __init__(self, directory: Path, settings: DemonstrationSettings) -> None:
        self.directory = directory
        self.settings = settings
        # Candidate -> (success, steps), which are also part of the file's name.
        self.kept: dict[int, tuple[bool, int]] = {}
        for path in self.files():
            _, candidate, outcome, length = path.stem.split("-")
            self.kept[int(candidate)] = (outcome == "success", int(length))
        self.next_candidate = max(self.kept, default=-1) + 1
        file = directory / "settings.json"
        if self.kept:
            require_equal_settings(file, settings, "an unfinished collection")
        write_text_atomically(file, settings_text(settings))

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
            write_atomically(self.directory / name, lambda file: _save_rollout(file, rollout))
            self.kept[candidate] = (rollout.succeeded, rollout.length)
        wanted = self.settings.num_episodes
        if self.next_candidate >= _MAX_CANDIDATES_PER_EPISODE * wanted and not self.complete:
            raise EnvError(
                f"after {self.next_candidate} candidates there are {self.num_successes} successes and "
                f"{len(self.kept) - self.num_successes} failures of the {wanted} episodes wanted: a success_share "
                f"of {self.settings.success_share} is out of reach with the mix {dict(self.settings.mix)}"
            )

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("episode-*.npz"))

    def _wants(self, success: bool) -> bool:
        total, share = self.settings.num_episodes, self.settings.success_share
        if share is None:
            return len(self.kept) < total
        successes = round(share * total)
        failures = len(self.kept) - self.num_successes
        return self.num_successes < successes if success else failures < total - successes


def _play(envs: EnvPool, expert: type[Expert], partial: _PartialCollection, show_progress: bool) -> None:
    """Plays candidates until the collection is complete, with a progress bar."""
    settings = partial.settings
    played = _candidates(envs, expert, settings, partial.next_candidate)
    numbers = TextColumn("{task.completed} episodes, {task.fields[successes]} successes, {task.fields[tried]} tried")
    with progress(numbers, disable=not show_progress) as bar:
        task = bar.add_task(settings.env, total=settings.num_episodes, successes=0, tried=0)
        while not partial.complete:
            partial.add(*next(played))
            successes, tried = partial.num_successes, partial.next_candidate
            bar.update(task, completed=len(partial.kept), successes=successes, tried=tried)


def _candidates(
    envs: EnvPool, expert: type[Expert], settings: DemonstrationSettings, first: int
) -> Iterator[tuple[int, Rollout | None]]:
    """Candidates in the order of their numbers, however long each takes; None for one that failed twice."""
    calls = ((demonstrate, expert, settings.seed_of(n), settings.quality_of(n)) for n in itertools.count(first))
    for candidate, result in enumerate(envs.run_in_order(calls), first):
        if len(envs.failures) > _MAX_FAILURES:
            raise EnvError(f"demonstrations in {settings.env!r} keep failing; the last: {envs.failures[-1].reason}")
        yield candidate, None if isinstance(result, EnvFailure) else result


def _save_rollout(file: IO[bytes], rollout: Rollout) -> None:
    arrays = {name: getattr(rollout, name) for name in _STORED}
    arrays |= {_OBSERVATION + name: values for name, values in rollout.observations.items()}
    # numpy's own compression is four times as slow, and no smaller for rendered frames.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _load_rollout(path: Path) -> Rollout:
    with np.load(path, allow_pickle=False) as file:
        content = {name: array if array.ndim else array.item() for name, array in file.items()}
    stored = {name: content.pop(name) for name in _STORED}
    return Rollout(**stored, observations={name.removeprefix(_OBSERVATION): v for name, v in content.items()})
