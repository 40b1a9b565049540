"""Rewards of OGBench's tasks, computed from recorded states as OGBench does it for its single-task datasets."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from acrlpd.execution.base import Columns

# The steps of one or more episodes under OGBench's names: observations, actions, terminals, qpos, ...
Rows = Mapping[str, np.ndarray]

_TOLERANCE = 0.04  # metres between an object and its goal


def task_columns(simulator: Any, rows: Rows) -> Columns:
    """`task1.reward`, `task1.success`, `task2.reward`, ...: what each task says about each row's own state.

    The reward is minus the number of unsolved subtasks (cubes, buttons, drawer and window that are not at their goal).
    A success is a state without unsolved subtasks. `simulator` is the simulator of a single-task environment.
    """
    columns: Columns = {}
    for number, task in enumerate(simulator.task_infos, 1):
        solved = np.column_stack(list(_solved(simulator, task, rows)))  # [rows, subtasks]
        columns[f"task{number}.reward"] = (solved.sum(axis=-1) - solved.shape[-1]).astype(np.float32)
        columns[f"task{number}.success"] = np.asarray(solved.all(axis=-1))
    return columns


def _solved(simulator: Any, task: Mapping[str, Any], rows: Rows) -> Iterator[np.ndarray]:
    """Whether subtasks are solved: bool [rows], or [rows, buttons]. OGBench has one layout of goals per environment."""
    goal = {
        "cube": lambda: {"block_xyzs": task["goal_xyzs"]},
        "puzzle": lambda: {"button_states": task["goal_button_states"]},
        "scene": lambda: task["goal"],
    }[simulator.kind]()
    for cube, goal_position in enumerate(goal.get("block_xyzs", ())):
        first = _address(simulator, f"object_joint_{cube}")
        yield np.linalg.norm(rows["qpos"][:, first : first + 3] - goal_position, axis=-1) <= _TOLERANCE
    if "button_states" in goal:
        yield rows["button_states"] == goal["button_states"]
    for part in ("drawer", "window"):
        if f"{part}_pos" in goal:
            distance = rows["qpos"][:, _address(simulator, f"{part}_slide")] - goal[f"{part}_pos"]
            yield np.abs(distance) <= _TOLERANCE


def _address(simulator: Any, joint: str) -> int:
    """Where a joint begins in qpos."""
    return int(simulator._model.joint(joint).qposadr[0])
