"""What the scripted OGBench expert does next.

A goal is something that one of OGBench's oracles can do: move a cube, press a button, slide the drawer or the window.
`next_goal` chooses the next step of the task; `random_goal` chooses any.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

# Positions of the open drawer and the open window; closed is 0.
_OPEN = {"drawer": -0.16, "window": 0.2}
_DIRECTION = {"drawer": np.array([0.0, -1.0, 0.0]), "window": np.array([1.0, 0.0, 0.0])}
_TOLERANCE = 0.04  # metres, as in OGBench
# The place in the open drawer from which a cube reaches the task's goal when the drawer closes.
_IN_DRAWER = np.array([0.33, -0.21, 0.066])
_CUBE_SIZE = 0.04


@dataclasses.dataclass(frozen=True)
class CubeGoal:
    """Move a cube to a place."""

    cube: int
    position: np.ndarray
    yaw: float
    oracle = "cube"

    def info(self, simulator: Any) -> dict[str, Any]:
        """What the oracle has to be told."""
        return {
            "privileged/target_block": self.cube,
            "privileged/target_block_pos": self.position,
            "privileged/target_block_yaw": np.array([self.yaw]),
        }


@dataclasses.dataclass(frozen=True)
class ButtonGoal:
    """Press a button until it shows a state."""

    button: int
    state: int
    oracle = "button"

    def info(self, simulator: Any) -> dict[str, Any]:
        site = simulator._button_site_ids[self.button]
        return {
            "privileged/target_button": self.button,
            "privileged/target_button_state": self.state,
            "privileged/target_button_top_pos": simulator._data.site_xpos[site].copy(),
        }


@dataclasses.dataclass(frozen=True)
class SlideGoal:
    """Slide the drawer or the window to a position."""

    part: Literal["drawer", "window"]
    position: float

    @property
    def oracle(self) -> str:
        return self.part

    def info(self, simulator: Any) -> dict[str, Any]:
        handle = simulator._data.site_xpos[getattr(simulator, f"_{self.part}_site_id")].copy()
        # The drawer slides along -y and the window along x.
        handle += (self.position - slide(simulator, self.part)) * _DIRECTION[self.part]
        return {f"privileged/target_{self.part}_handle_pos": handle}


Goal = CubeGoal | ButtonGoal | SlideGoal


def next_goal(simulator: Any, rng: np.random.Generator) -> Goal:
    """The next step of the task; a random goal where nothing is left to do and the episode has not ended yet."""
    choose = {"cube": _next_cube, "puzzle": _next_press, "scene": _next_in_scene}[simulator.kind]
    return choose(simulator, rng) or random_goal(simulator, rng)


def random_goal(simulator: Any, rng: np.random.Generator) -> Goal:
    """Any goal that the environment has."""
    kinds = {"cube": ["cube"], "puzzle": ["button"], "scene": ["cube", "button", "drawer", "window"]}
    kind = rng.choice(kinds[simulator.kind])
    if kind == "button":
        button = int(rng.integers(simulator._num_buttons))
        return ButtonGoal(button, 1 - int(simulator._cur_button_states[button]))
    if kind in _OPEN:
        is_closed = abs(slide(simulator, kind)) <= abs(_OPEN[kind]) / 2
        return SlideGoal(kind, _OPEN[kind] if is_closed else 0.0)
    free = [cube for cube in range(simulator._num_cubes) if not _covered(simulator, cube)]
    return _anywhere(simulator, int(rng.choice(free)), rng)


def slide(simulator: Any, joint: str) -> float:
    """Position of the drawer or the window."""
    return float(simulator._data.joint(f"{joint}_slide").qpos[0])


# -- cubes -----------------------------------------------------------------------------------------------


def cube_positions(simulator: Any) -> np.ndarray:
    """[cubes, 3]"""
    cubes = range(simulator._num_cubes)
    return np.array([simulator._data.joint(f"object_joint_{cube}").qpos[:3] for cube in cubes])


def goal_positions(simulator: Any) -> np.ndarray:
    """[cubes, 3]; in single-task environments cubes are not permuted."""
    return np.asarray(simulator._data.mocap_pos[simulator._cube_target_mocap_ids]).copy()


def _next_cube(simulator: Any, rng: np.random.Generator) -> Goal | None:
    """Moves an uncovered cube whose place is free; where no place is free, moves a cube out of the way."""
    now, goals = cube_positions(simulator), goal_positions(simulator)
    todo = [i for i in range(len(now)) if np.linalg.norm(now[i] - goals[i]) > _TOLERANCE]
    todo.sort(key=lambda i: goals[i][2])
    for cube in todo:
        below = [i for i in todo if goals[i][2] < goals[cube][2] - 0.01 and _same_spot(goals[i], goals[cube])]
        taken = [i for i in range(len(now)) if i != cube and np.linalg.norm(now[i] - goals[cube]) < _CUBE_SIZE]
        if not below and not taken and not _covered(simulator, cube):
            return CubeGoal(cube, goals[cube], 0.0)
    free = [cube for cube in todo if not _covered(simulator, cube)]
    return _anywhere(simulator, free[0], rng) if free else None


def _covered(simulator: Any, cube: int) -> bool:
    positions = cube_positions(simulator)
    return any(other[2] > positions[cube][2] + 0.01 and _same_spot(other, positions[cube]) for other in positions)


def _same_spot(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(np.linalg.norm(first[:2] - second[:2]) < _CUBE_SIZE)


def _anywhere(simulator: Any, cube: int, rng: np.random.Generator) -> CubeGoal:
    """Moves a cube to a random place on the table, away from the other cubes and from the goals of all cubes."""
    low, high = simulator._target_sampling_bounds
    occupied = np.concatenate([np.delete(cube_positions(simulator), cube, axis=0), goal_positions(simulator)])
    position = np.array([*rng.uniform(low, high), _CUBE_SIZE / 2])
    for _ in range(100):
        if all(np.linalg.norm(place[:2] - position[:2]) > 2 * _CUBE_SIZE for place in occupied):
            break
        position[:2] = rng.uniform(low, high)
    return CubeGoal(cube, position, rng.uniform(0, 2 * np.pi))


# -- puzzle ----------------------------------------------------------------------------------------------


def _next_press(simulator: Any, rng: np.random.Generator) -> Goal | None:
    states = np.asarray(simulator._cur_button_states)
    wrong = (states + simulator._target_button_states) % 2
    presses = solve_lights_out(wrong, simulator._num_rows, simulator._num_cols)
    if not presses.any():
        return None
    button = int(np.flatnonzero(presses)[0])
    return ButtonGoal(button, 1 - int(states[button]))


def solve_lights_out(wrong: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The buttons to press so that exactly the `wrong` ones [rows * columns] flip: linear equations modulo 2."""
    size = rows * columns
    row, column = np.divmod(np.arange(size), columns)
    distance = abs(row[:, None] - row) + abs(column[:, None] - column)
    system = np.column_stack([distance <= 1, wrong % 2]).astype(np.int64)
    pivots: list[int] = []
    for button in range(size):
        first = len(pivots)
        candidates = np.flatnonzero(system[first:, button]) + first
        if not len(candidates):
            continue
        system[[first, candidates[0]]] = system[[candidates[0], first]]
        others = np.flatnonzero(system[:, button])
        system[others[others != first]] ^= system[first]
        pivots.append(button)
    if system[len(pivots) :, -1].any():
        raise ValueError(f"no presses turn {np.asarray(wrong).tolist()} off on a board of {rows} x {columns}")
    presses = np.zeros(size, np.int64)
    presses[pivots] = system[: len(pivots), -1]
    return presses


# -- scene -----------------------------------------------------------------------------------------------


def _next_in_scene(simulator: Any, rng: np.random.Generator) -> Goal | None:
    """Moves the cube first, then the drawer and the window, then presses the buttons, which lock these two."""
    drawer, window = slide(simulator, "drawer"), slide(simulator, "window")
    drawer_goal, window_goal = simulator._target_drawer_pos, simulator._target_window_pos
    buttons, button_goals = simulator._cur_button_states, simulator._target_button_states
    cube, cube_goal = cube_positions(simulator)[0], goal_positions(simulator)[0]
    if np.linalg.norm(cube - cube_goal) > _TOLERANCE and not simulator._is_in_drawer(cube):
        if cube_goal[2] < 0.05:
            return CubeGoal(0, cube_goal, 0.0)
        if drawer < 0.75 * _OPEN["drawer"]:
            return CubeGoal(0, _IN_DRAWER, 0.0)
        drawer_goal = _OPEN["drawer"]
    if abs(drawer - drawer_goal) > _TOLERANCE:
        return ButtonGoal(0, 1) if buttons[0] == 0 else SlideGoal("drawer", drawer_goal)
    if abs(window - window_goal) > _TOLERANCE:
        return ButtonGoal(1, 1) if buttons[1] == 0 else SlideGoal("window", window_goal)
    for button in range(2):
        if buttons[button] != button_goals[button]:
            return ButtonGoal(button, int(button_goals[button]))
    return None
