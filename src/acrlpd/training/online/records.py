"""The records of rounds in a replay: which episodes a round has, with checksums of the record and of its episodes."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from acrlpd.checksums import is_intact, read_json_with_checksum, stored_checksum, write_json_with_checksum
from acrlpd.data.pipeline.replay import RESTORE, ReplayError, episode_number, shard_name

REPLAY = "replay"  # the directory of the replay in the directory of a run


@dataclasses.dataclass(frozen=True)
class Round:
    """The result of a round, episode by episode in the order of their numbers."""

    number: int
    episodes: tuple[int, ...]  # their numbers in the replay, without the lost episodes
    lengths: tuple[int, ...]
    checksums: tuple[str, ...]  # of their shards
    successes: tuple[bool, ...]
    returns: tuple[float, ...]  # sums of the environment's own rewards
    lost_episodes: int  # to crashes and time-outs of the environment
    policy_step: int  # updates of the policy that played

    @property
    def env_steps(self) -> int:
        return sum(self.lengths)

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run."""
        metrics = {
            "episodes": float(len(self.episodes)),
            "lost_episodes": float(self.lost_episodes),
            "policy_step": float(self.policy_step),
        }
        if self.episodes:
            metrics |= {
                "success_rate": float(np.mean(self.successes)),
                "episode_reward_mean": float(np.mean(self.returns)),
                "episode_reward_min": float(np.min(self.returns)),
                "episode_reward_max": float(np.max(self.returns)),
                "episode_length_mean": float(np.mean(self.lengths)),
            }
        return metrics


def write_round(directory: pathlib.Path, played: Round) -> None:
    """Writes the record of a round whose episodes are all on disk."""
    try:
        write_json_with_checksum(_round_file(directory, played.number), dataclasses.asdict(played))
    except OSError as error:
        raise ReplayError(
            f"{directory}: the record of round {played.number} could not be written ({error.strerror or error}). "
            "Its episodes are complete; free some space and go on with --resume"
        ) from error


def read_round(directory: pathlib.Path, number: int) -> Round | None:
    """The record of a round that was played to its end; None if the round has no record."""
    path = _round_file(directory, number)
    if not path.exists():
        return None
    try:
        content = read_json_with_checksum(path)
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        return Round(**fields)
    except (ValueError, TypeError) as error:
        raise ReplayError(f"{path} is damaged ({error}); {RESTORE}") from error


def read_rounds(directory: pathlib.Path, first: int) -> list[Round]:
    """The records of the rounds from `first` on that are on disk now, up to the first missing round."""
    rounds: list[Round] = []
    while (played := read_round(directory, first + len(rounds))) is not None:
        rounds.append(played)
    return rounds


def files_after_rounds(directory: pathlib.Path, num_rounds: int) -> list[pathlib.Path]:
    """The files in the replay in `directory` that do not belong to the first `num_rounds` rounds.

    The records come first, the last one before the others, then the episodes. A file of columns, by which an episode
    counts, comes before the frames of its episode.
    """
    rounds = sorted(directory.glob("round-*.json"), reverse=True)
    known = {number for played in read_rounds(directory, 0)[:num_rounds] for number in played.episodes}
    episodes = [path for path in sorted(directory.glob("episode-*")) if episode_number(path.name) not in (None, *known)]
    first = _round_file(directory, num_rounds)
    return [*(path for path in rounds if path >= first), *sorted(episodes, key=lambda path: path.suffix != ".npz")]


def verify_rounds(directory: pathlib.Path) -> Iterator[str]:
    """What is wrong with the records of rounds in the replay in `directory`, with the name of the file.

    A record is sound if its checksum fits, no record before it is missing, and its episodes are on disk.
    """
    for expected, path in enumerate(sorted(directory.glob("round-*.json"))):
        if path != _round_file(directory, expected):
            yield f"{_round_file(directory, expected)} is missing, but {path.name} is there; {RESTORE}"
            return
        try:
            played = read_round(directory, expected)
        except ReplayError as error:
            yield str(error)
            continue
        assert played is not None, "the file is there"
        yield from episode_problems(directory, played)


def episode_problems(directory: pathlib.Path, played: Round) -> Iterator[str]:
    """Which episodes of a round are not on disk: their file is missing, or it is an intact file of another episode.

    A damaged file is named where it is read.
    """
    for number, length, checksum in zip(played.episodes, played.lengths, played.checksums, strict=True):
        shard = directory / shard_name(number, length)
        if not shard.is_file():
            yield f"{shard} is missing, but the record of round {played.number} names this episode; {RESTORE}"
        elif (found := stored_checksum(shard)) != checksum and is_intact(shard):
            yield (
                f"{shard} is not the file that round {played.number} wrote: its checksum is {found}, the record of the "
                f"round says {checksum}; {RESTORE}"
            )


def _round_file(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"round-{number:06d}.json"
