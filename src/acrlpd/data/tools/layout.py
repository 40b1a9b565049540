"""Which robot a dataset is of, and which of its columns are state, actions and cameras: guesses from names and dims."""

import dataclasses
import math
from collections.abc import Sequence

from acrlpd.choice import find_kind, kind_names
from acrlpd.data.sources.source import DatasetError, EpisodeSource
from acrlpd.robots.base import SLOTS, DatasetColumns, Robot

# Words in the names of columns and cameras, the most telling first.
_ACTION_WORDS = ("action", "command", "control", "target")
_STATE_WORDS = ("state", "qpos", "joint", "position", "pose", "gripper", "proprio")
_WRIST_WORDS = ("wrist", "hand", "gripper")
_SCENE_WORDS = ("high", "top", "front", "base", "exterior", "external", "agent", "main", "scene")
# Columns with which recorders count, and those of rewards: neither state nor action.
_COUNTERS = (
    "timestamp",
    "index",
    "frame_index",
    "episode_index",
    "task_index",
    "reward",
    "done",
    "success",
    "truncated",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A dataset as a config describes it."""

    robot: str  # a kind of `data.robot`
    columns: DatasetColumns
    state_dim: int
    action_dim: int
    # What was not chosen, and could be.
    other_columns: tuple[str, ...]
    other_cameras: tuple[str, ...]


def find_layout(source: EpisodeSource) -> Layout:
    """The layout of a robot that the project knows, or else one that the names suggest, for the robot `generic`."""
    dims = {
        name: math.prod(source.features[name].shape)
        for name in source.column_names
        if source.features[name].dtype.startswith("float") and _leaf(name) not in _COUNTERS
    }
    robot, columns = _recognize(dims, source.cameras) or ("generic", _guess(source, dims))
    used = (*columns.state, *columns.actions)
    return Layout(
        robot=robot,
        columns=columns,
        state_dim=sum(dims[name] for name in columns.state),
        action_dim=sum(dims[name] for name in columns.actions),
        other_columns=tuple(name for name in dims if name not in used),
        other_cameras=tuple(camera for camera in source.cameras if camera not in columns.cameras.values()),
    )


def _recognize(dims: dict[str, int], cameras: Sequence[str]) -> tuple[str, DatasetColumns] | None:
    for kind in kind_names(Robot):
        columns = find_kind(Robot, kind).recognize(dims, cameras)
        if columns is not None:
            return kind, columns
    return None


def _guess(source: EpisodeSource, dims: dict[str, int]) -> DatasetColumns:
    """One column of actions, and the columns of the state."""
    if len(dims) < 2:
        raise DatasetError(
            f"{source.root}: a policy needs a state and actions, which are columns of floats; found {list(dims)} among "
            f"the columns {source.column_names}"
        )
    # A column whose whole name is that of the action comes before, for example, "policy_action".
    ranked = sorted(dims, key=lambda name: (_leaf(name) not in ("action", "actions"), _rank(name, _ACTION_WORDS)))
    # Where no name tells, the action is the column that was recorded last.
    actions = ranked[0] if _rank(ranked[0], _ACTION_WORDS) < len(_ACTION_WORDS) else list(dims)[-1]
    rest = [name for name in dims if name != actions and _rank(name, _ACTION_WORDS) == len(_ACTION_WORDS)]
    rest = rest or [name for name in dims if name != actions]
    states = [name for name in rest if _leaf(name) == "state"][:1]
    states = states or [name for name in rest if _rank(name, _STATE_WORDS) < len(_STATE_WORDS)] or rest
    return DatasetColumns(tuple(states), (actions,), _assign_cameras(source.cameras))


def _assign_cameras(cameras: Sequence[str]) -> dict[str, str]:
    """Wrist cameras to the slots of wrists, then the others to the slots that are free, the base first."""
    wrists = [camera for camera in cameras if _rank(camera, _WRIST_WORDS) < len(_WRIST_WORDS)]
    scenes = sorted((c for c in cameras if c not in wrists), key=lambda camera: _rank(camera, _SCENE_WORDS))
    base, left, right = SLOTS
    slots: dict[str, str] = {}
    for camera in wrists:
        wanted = (right, left) if "right" in _leaf(camera) and "left" not in _leaf(camera) else (left, right)
        free = [slot for slot in wanted if slot not in slots]
        if free:
            slots[free[0]] = camera
    for camera in scenes:
        free = [slot for slot in (base, left, right) if slot not in slots]
        if free:
            slots[free[0]] = camera
    return {slot: slots[slot] for slot in SLOTS if slot in slots}


def _leaf(name: str) -> str:
    """What stands after the last dot, in lower case."""
    return name.rpartition(".")[2].lower()


def _rank(name: str, words: Sequence[str]) -> int:
    """The number of the first word that is part of the name, or how many words there are."""
    return next((i for i, word in enumerate(words) if word in name.lower()), len(words))
