"""OGBench's play: one random target after another, as OGBench records it for its datasets. No JAX here."""

import itertools
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from acrlpd.envs.env import Env
from acrlpd.envs.ogbench_env import RAW_STATE, make_play_simulator
from acrlpd.execution.base import Columns
from acrlpd.experts.ogbench import make_oracle
from acrlpd.experts.ogbench_rewards import Rows, task_columns
from acrlpd.files import write_atomically

# Bounds between which the probability of a target on top of another cube is drawn for each episode.
_STACKING = {"cube-double": (0.0, 0.25), "cube-triple": (0.05, 0.35), "cube-quadruple": (0.1, 0.5)}
# How OGBench stores its arrays; other arrays are float32. Rewards are computed from the stored numbers.
_DTYPES = {"terminals": np.bool_, "button_states": np.int64}


def record_episode(task_env: Env, env: str, steps: int, seed: int, number: int, file: Path) -> None:
    """Plays the episode with this number and stores its columns in a file.

    In the scene, an episode that is not healthy is played again with another seed.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # MuJoCo's solver warns of many single steps of the scene
    kind = task_env.env.kind
    for attempt in itertools.count():
        episode_seed = np.random.SeedSequence([seed, number, attempt]).generate_state(1)[0]
        rows = play_episode(env, kind, steps, int(episode_seed))
        if kind != "scene" or is_healthy(rows):
            break
    columns = play_columns(task_env, rows)
    write_atomically(file, lambda stream: np.savez(stream, **columns))  # type: ignore[arg-type]


def play_columns(task_env: Env, rows: Rows) -> Columns:
    """The columns of a dataset: state, action, and what each task says about the state."""
    columns = {RAW_STATE: rows["observations"], task_env.spec.action_column: rows["actions"]}
    return columns | task_columns(task_env.env, rows)


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
