"""The scripted cube transfer of gym-aloha: the right arm picks the cube up, and the left arm takes it over.

When the episode starts the expert plans poses of the fingers over time, turns them into joint positions by damped least
squares, and interpolates between them.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from acrlpd.envs.env import Env
from acrlpd.experts.expert import Expert

# Where the fingers close, relative to the last body of the kinematics.
FINGERTIP = np.array([0.1347, 0.0, 0.0])
_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
_OPEN, _CLOSED = 1.0, 0.0
_CUBE_HEIGHT = 0.02  # of the centre of a cube that lies on the table
_MEETING_POINT = np.array([0.0, 0.5, 0.3])
# Heading, pitch and roll of the grippers: the right one looks down, the left one is turned onto its side.
_GRIPPER_ANGLES = {"left": (0.0, 0.0, np.pi / 2), "right": (np.pi, np.deg2rad(60.0), 0.0)}
# Angles of the wrists from which the search for poses starts. The right wrist starts bent, opposite to its angle at
# rest. A search that passes the straight wrist turns the forearm over for some cubes and not for their neighbours, and
# demonstrations that jump between neighbouring cubes are hard to imitate.
_WRIST_BEND = {"left": -0.3, "right": 0.6}
_DETOUR = 65  # steps by which a grasp beside the cube delays the rest
_SHORT = 0.07  # metres between the cube and a left hand that misses it
_MAX_ITERATIONS = 200
_MAX_STEP = 0.2  # radians per iteration of the inverse kinematics
_DAMPING = 1e-2
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well the expert does its work. A pair holds the bounds between which a number is drawn per episode."""

    shows: str  # for people
    noise: tuple[float, float]  # standard deviation of the joint targets in radians
    aim_probability: float = 1.0  # that the right arm reaches for the cube itself
    miss: tuple[float, float] = (0.04, 0.08)  # metres by which the arm otherwise reaches beside the cube
    pace: tuple[float, float] = (0.9, 1.1)  # of all movements; larger is slower
    # The most metres by which the hand arrives beside its aim, before it goes down. If the hand always arrived right
    # above the aim, a policy would not have to look at the cube on the way down and would learn no corrections.
    drift: float = 0.03
    # How often the right arm first grasps beside the cube, so that the success comes late. In all other episodes the
    # left arm closes before it has reached the cube, so that what was right until then fails. None: neither happens.
    detour_probability: float | None = None


QUALITIES = {
    "expert": Quality("smooth, and hands the cube over", noise=(0.0, 0.005)),
    "noisy": Quality("hands the cube over with noise on every joint", noise=(0.005, 0.03)),
    "mixed": Quality(
        "noisy, and reaches for the cube in half of the episodes, beside it in the others",
        noise=(0.0, 0.02),
        aim_probability=0.5,
    ),
    "detours": Quality(
        "noisy, and grasps beside the cube before it hands it over, or is quick and fails at the handover",
        noise=(0.0, 0.02),
        detour_probability=0.5,
    ),
}


class Waypoint(NamedTuple):
    """Where the fingers of one arm are at a step, and how open they are."""

    step: int
    position: np.ndarray  # [3] metres
    opening: float


class TransferExpert(Expert):
    """Follows a plan for the initial pose of the cube, with noise."""

    qualities: ClassVar[dict[str, str]] = {name: quality.shows for name, quality in QUALITIES.items()}

    def __init__(self, env: Env, quality: str, rng: np.random.Generator) -> None:
        settings = QUALITIES[quality]
        self._rng = rng
        self._noise = rng.uniform(*settings.noise)
        model, data = env.env.physics.model.ptr, env.env.physics.data.ptr
        cube = np.array([*data.qpos[16:18], _CUBE_HEIGHT])
        if rng.uniform() >= settings.aim_probability:
            cube[:2] += rng.uniform(*settings.miss) * direction(rng)
        drift = settings.drift * np.sqrt(rng.uniform()) * direction(rng)
        pace = rng.uniform(*settings.pace)
        left_way, right_way = left_waypoints(), right_waypoints(cube, drift)
        if settings.detour_probability is not None:
            if rng.uniform() < settings.detour_probability:
                beside = cube + np.append(rng.uniform(*settings.miss) * direction(rng), 0.0)
                left_way = [left_way[0], *delayed(left_way[1:])]
                right_way = [*grasp_at(beside, drift), *delayed(right_waypoints(cube, np.zeros(2)))]
            else:
                left_way = left_waypoints(short=_SHORT)
        left = Arm(model, "left").plan(data, left_way, pace)
        right = Arm(model, "right").plan(data, right_way, pace)
        self._plan = np.concatenate([left, right], axis=1)  # [steps, 14]
        self._step = 0

    def act(self) -> np.ndarray:
        """Joint targets and gripper openings [14]; after the end of the plan, those of its last step."""
        action = self._plan[min(self._step, len(self._plan) - 1)].copy()
        self._step += 1
        noise = self._rng.normal(0.0, self._noise, 14)
        noise[[6, 13]] = 0.0  # the grippers are open or closed
        return (action + noise).astype(np.float32)


def right_waypoints(cube: np.ndarray, drift: np.ndarray) -> list[Waypoint]:
    """The way: high above the cube and `drift` [2] beside it, lower, down, close, up to the meeting point, let go."""
    return [
        Waypoint(45, cube + np.array([*drift, 0.1]), _OPEN),
        Waypoint(62, cube + np.array([0.0, 0.0, 0.06]), _OPEN),
        Waypoint(78, cube, _OPEN),
        Waypoint(95, cube, _CLOSED),
        Waypoint(135, _MEETING_POINT, _CLOSED),
        Waypoint(190, _MEETING_POINT, _CLOSED),
        Waypoint(205, _MEETING_POINT, _OPEN),
        Waypoint(235, _MEETING_POINT + np.array([0.1, 0.0, 0.0]), _OPEN),
    ]


def left_waypoints(short: float = 0.0) -> list[Waypoint]:
    """The way: beside the meeting point with one finger above and one below, towards the cube, close.

    A hand that stops `short` of the cube, in metres, closes on nothing.
    """
    beside = _MEETING_POINT - np.array([0.12, 0.0, 0.0])
    end = _MEETING_POINT - np.array([short, 0.0, 0.0])
    return [
        Waypoint(100, beside, _OPEN),
        Waypoint(135, beside, _OPEN),
        Waypoint(170, end, _OPEN),
        Waypoint(190, end, _CLOSED),
        Waypoint(205, end, _CLOSED),
        Waypoint(235, beside, _CLOSED),
    ]


def grasp_at(place: np.ndarray, drift: np.ndarray) -> list[Waypoint]:
    """A grasp of nothing above a place on the table; the fingers stay so high that no cube beside it moves."""
    above = place + np.array([0.0, 0.0, 0.06])
    return [
        Waypoint(45, place + np.array([*drift, 0.1]), _OPEN),
        Waypoint(62, above, _OPEN),
        Waypoint(75, above, _CLOSED),
    ]


def delayed(way: list[Waypoint]) -> list[Waypoint]:
    """The same way after a grasp beside the cube."""
    return [waypoint._replace(step=waypoint.step + _DETOUR) for waypoint in way]


def direction(rng: np.random.Generator) -> np.ndarray:
    """A random direction on the table [2]."""
    angle = rng.uniform(0, 2 * np.pi)
    return np.array([np.cos(angle), np.sin(angle)])


def gripper_rotation(heading: float, pitch: float, roll: float) -> np.ndarray:
    """A gripper turned about the vertical, then tilted down, then turned about its own axis: [3, 3].

    The columns are forward, left and up of the gripper.
    """
    (ch, cp, cr), (sh, sp, sr) = np.cos([heading, pitch, roll]), np.sin([heading, pitch, roll])
    turn = np.array([[ch, -sh, 0], [sh, ch, 0], [0, 0, 1]])
    tilt = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    spin = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    return turn @ tilt @ spin


class Arm:
    """Inverse kinematics of one arm."""

    def __init__(self, model: Any, side: str) -> None:
        import mujoco

        self._model = model
        self._data = mujoco.MjData(model)  # a copy, so that planning does not change the simulation
        joints = [model.joint(f"vx300s_{side}/{joint}") for joint in _JOINTS]
        self._qpos = np.array([joint.qposadr[0] for joint in joints])
        self._dofs = np.array([joint.dofadr[0] for joint in joints])
        self._low, self._high = np.array([joint.range for joint in joints]).T
        self._body = model.body(f"vx300s_{side}/gripper_link").id
        self._wrist_bend = _WRIST_BEND[side]
        self._rotation = gripper_rotation(*_GRIPPER_ANGLES[side])

    def plan(self, data: Any, waypoints: list[Waypoint], pace: float) -> np.ndarray:
        """Joint positions and opening [steps, 7] from the present pose of the arm through all waypoints."""
        self._data.qpos[:] = data.qpos
        joints, openings = [self._data.qpos[self._qpos].copy()], [_CLOSED]
        self._data.qpos[self._qpos[_JOINTS.index("wrist_angle")]] = self._wrist_bend
        for waypoint in waypoints:
            joints.append(self.solve(waypoint.position))
            openings.append(waypoint.opening)
        times = pace * np.array([0, *(waypoint.step for waypoint in waypoints)])
        steps = np.arange(1, int(times[-1]) + 1)
        # Movements start and end slowly, so that the first steps do not show yet where the cube lies.
        position = np.interp(steps, times, np.arange(len(times)))  # in waypoints
        passed, share = np.divmod(np.minimum(position, len(times) - 1 - 1e-9), 1.0)
        position = passed + share**3 * (10 - 15 * share + 6 * share**2)
        columns = [*np.transpose(joints), openings]
        return np.stack([np.interp(position, np.arange(len(times)), column) for column in columns], axis=1)

    def solve(self, position: np.ndarray) -> np.ndarray:
        """Joint positions [6] that bring the fingertips to a position; the search starts from the last solution."""
        import mujoco

        model, data = self._model, self._data
        jacobian, quaternion, error = np.empty((6, model.nv)), np.empty(4), np.empty(6)
        for _ in range(_MAX_ITERATIONS):
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            turned = data.xmat[self._body].reshape(3, 3)
            tip = data.xpos[self._body] + turned @ FINGERTIP
            error[:3] = position - tip
            mujoco.mju_mat2Quat(quaternion, (self._rotation @ turned.T).ravel())
            mujoco.mju_quat2Vel(error[3:], quaternion, 1.0)  # axis times angle of the rotation that is left
            if np.linalg.norm(error) < _TOLERANCE:
                break
            mujoco.mj_jac(model, data, jacobian[:3], jacobian[3:], tip, self._body)
            j = jacobian[:, self._dofs]
            change = j.T @ np.linalg.solve(j @ j.T + _DAMPING**2 * np.eye(6), error)
            change *= min(1.0, _MAX_STEP / (np.abs(change).max() + 1e-12))
            data.qpos[self._qpos] = np.clip(data.qpos[self._qpos] + change, self._low, self._high)
        return data.qpos[self._qpos].copy()
