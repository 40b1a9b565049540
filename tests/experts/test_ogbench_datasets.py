"""OGBench's play datasets: equal to what OGBench records, equal after an interruption, and refused where damaged."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sim_marks import needs_ogbench

from acrlpd.cli.main import main
from acrlpd.data.sources.source import DatasetError, open_source
from acrlpd.envs import Env, EnvError, make_env
from acrlpd.experts import ogbench_play
from acrlpd.experts.ogbench_datasets import PlaySettings, generate_play, import_play
from acrlpd.experts.ogbench_play import is_healthy, play_episode, record_episode
from acrlpd.experts.ogbench_rewards import Rows, task_columns

pytestmark = needs_ogbench

SETTINGS = PlaySettings("cube-double", num_episodes=3, episode_steps=12, seed=5)


def task_env(env: str) -> Env:
    return make_env(f"{env}-play-singletask-v0")


def episode_seed(number: int, attempt: int = 0) -> int:
    return int(np.random.SeedSequence([SETTINGS.seed, number, attempt]).generate_state(1)[0])


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("play") / "cubes"
    generate_play(SETTINGS, output, num_workers=0, show_progress=False)
    return output


@pytest.fixture(scope="module")
def episodes() -> list[Rows]:
    """The rows of the four episodes of `generated`."""
    return [play_episode("cube-double", "cube", SETTINGS.episode_steps, episode_seed(number)) for number in range(4)]


# -- what is recorded ------------------------------------------------------------------------------------


def record_as_ogbench(env: str, steps: int, seed: int, stacking: tuple[float, float]) -> tuple[Rows, int]:
    """Play in OGBench's own environment, without our simulator; also how many targets were reached."""
    stock = importlib.import_module("gymnasium").make(
        f"{env}-v0", terminate_at_goal=False, mode="data_collection", max_episode_steps=steps
    )

    def oracle(info: dict) -> object:
        what = info["privileged/target_task"]
        module = importlib.import_module(f"ogbench.manipspace.oracles.plan.{what}_plan")
        options = {"gripper_always_closed": True} if "puzzle" in env else {}
        made = getattr(module, f"{what.capitalize()}PlanOracle")(env=stock, noise=0.1, noise_smoothing=0.5, **options)
        made.reset(None, info)
        return made

    np.random.seed(seed)  # noqa: NPY002
    observation, info = stock.reset(seed=seed)
    p_stack = np.random.uniform(*stacking)  # noqa: NPY002
    acting, reached, rows = oracle(info), 0, defaultdict(list)
    for _ in range(steps):
        rows["observations"].append(observation)
        rows["actions"].append(np.clip(acting.select_action(observation, info), -1, 1))
        observation, _, _, _, info = stock.step(rows["actions"][-1])
        for name in ("qpos", "qvel", "button_states"):
            if name in info:
                rows[name].append(info[f"prev_{name}"])
        if acting.done:
            reached += 1
            acting = oracle(stock.unwrapped.set_new_target(p_stack=p_stack)[1])
    return {name: np.array(values) for name, values in rows.items()}, reached


@pytest.mark.parametrize(
    ("env", "kind", "stacking"),
    [("puzzle-3x3", "puzzle", (0.0, 0.0)), ("cube-double", "cube", (0.0, 0.25)), ("scene", "scene", (0.0, 0.0))],
)
def test_an_episode_is_what_ogbench_records(env: str, kind: str, stacking: tuple[float, float]) -> None:
    found = play_episode(env, kind, 110, 7)
    expected, reached = record_as_ogbench(env, 110, 7, stacking)
    assert reached  # a second target was chosen
    assert found["terminals"].tolist() == [False] * 109 + [True]
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values.astype(found[name].dtype), err_msg=name)


def test_only_healthy_episodes_of_the_scene_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cube_at(*position: float) -> Rows:
        qpos = np.zeros((3, 25))
        qpos[:, 14:17], qpos[1, 14:17] = (0.4, 0.0, 0.02), position
        return {"qpos": qpos}

    assert is_healthy(cube_at(0.4, 0.28, 0.02)) and is_healthy(cube_at(0.33, -0.31, 0.066))
    assert not is_healthy(cube_at(0.4, 0.3, 0.02)) and not is_healthy(cube_at(0.33, -0.31, 0.02))

    judged: list[Rows] = []

    def refuse_first(rows: Rows) -> bool:
        judged.append(rows)
        return len(judged) > 1

    monkeypatch.setattr(ogbench_play, "is_healthy", refuse_first)
    record_episode(task_env("scene"), "scene", 3, SETTINGS.seed, 0, tmp_path / "episode.npz")
    with np.load(tmp_path / "episode.npz") as kept:
        np.testing.assert_array_equal(kept["observation.raw_state"], judged[1]["observations"])
    second = play_episode("scene", "scene", 3, episode_seed(0, attempt=1))
    np.testing.assert_array_equal(judged[1]["observations"], second["observations"])


# -- rewards ---------------------------------------------------------------------------------------------


def rows_near_goals(simulator: object) -> Rows:
    """States at, near and away from the goals of all tasks, in the layout that the wheel's relabelling reads."""
    rng = np.random.default_rng(0)
    num_cubes, num_buttons = getattr(simulator, "_num_cubes", 0), getattr(simulator, "_num_buttons", 0)
    cubes = "block_xyzs" if num_buttons else "xyzs"
    qpos, buttons = [], []
    for task in simulator.task_infos:  # type: ignore[attr-defined]
        goal = task.get("goal") or {name.removeprefix("goal_"): value for name, value in task.items()}
        for scale in np.repeat([0.0, 0.3, 1.0], 60):
            row = rng.normal(0, 1, 14 + 7 * num_cubes + num_buttons + 2)
            for cube in range(num_cubes):
                row[14 + 7 * cube :][:3] = goal[cubes][cube] + rng.normal(0, 0.04 * scale, 3)
            row[-2:] = goal.get("drawer_pos", 0.0), goal.get("window_pos", 0.0)
            row[-2:] += rng.normal(0, 0.06 * scale, 2)
            qpos.append(row)
            if num_buttons:
                buttons.append(goal["button_states"] ^ (rng.uniform(size=num_buttons) < 0.3 * scale))
    return {"qpos": np.array(qpos, np.float32), "button_states": np.array(buttons, np.int64)}


@pytest.mark.parametrize("env", ["scene", "puzzle-3x3", "cube-double"])
def test_rewards_are_those_of_ogbench(env: str) -> None:
    relabel = importlib.import_module("ogbench.relabel_utils").relabel_dataset
    simulator = task_env(env).env
    rows = rows_near_goals(simulator)
    columns = task_columns(simulator, rows)
    assert list(columns) == [f"task{task}.{what}" for task in range(1, 6) for what in ("reward", "success")]
    for task in range(1, 6):
        simulator._reward_task_id = task
        expected = dict(rows)
        relabel(env, simulator, expected)
        np.testing.assert_array_equal(columns[f"task{task}.reward"], expected["rewards"])
        np.testing.assert_array_equal(columns[f"task{task}.success"], expected["masks"] == 0)
        assert columns[f"task{task}.reward"].dtype == np.float32
        assert 0 < columns[f"task{task}.success"].mean() < 1


# -- the dataset -----------------------------------------------------------------------------------------


def test_the_dataset_has_states_actions_and_rewards_of_all_tasks(generated: Path, episodes: list[Rows]) -> None:
    train, validation = open_source(generated / "train"), open_source(generated / "validation")
    assert (len(train), len(validation), train.fps) == (3, 1, 20)
    assert json.loads((generated / "play.json").read_text()) == dataclasses.asdict(SETTINGS)
    simulator = task_env("cube-double").env
    for episode, rows in zip([*train, *validation], episodes, strict=True):
        expected = {"observation.raw_state": rows["observations"], "action": rows["actions"]}
        for name, values in (expected | task_columns(simulator, rows)).items():
            np.testing.assert_array_equal(episode.columns[name], values)
            assert episode.columns[name].dtype == values.dtype
        assert episode.prompt == "move the cubes" and np.abs(episode.columns["action"]).max() <= 1
    assert not np.array_equal(episodes[0]["actions"], episodes[1]["actions"])


@pytest.mark.slow
def test_a_killed_generation_goes_on_in_two_processes_to_the_same_bytes(generated: Path, tmp_path: Path) -> None:
    output = tmp_path / "cubes"
    script = (
        "import os, signal, sys\n"
        "from acrlpd.experts import ogbench_datasets as datasets\n"
        "record = datasets.record_episode\n"
        "def record_two(*args):\n"
        "    if args[4] == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    record(*args)\n"
        "datasets.record_episode = record_two\n"
        f"settings = datasets.{SETTINGS!r}\n"
        "datasets.generate_play(settings, sys.argv[1], num_workers=0)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(output)], env=os.environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = sorted((tmp_path / "cubes.partial").glob("*.npz"))
    assert [path.name for path in kept] == ["episode-000000.npz", "episode-000001.npz"] and not output.exists()
    with pytest.raises(EnvError, match="unfinished dataset with other settings: seed was 5 and is 6"):
        generate_play(dataclasses.replace(SETTINGS, seed=6), output)

    generate_play(SETTINGS, output, num_workers=2, show_progress=False)
    assert content(output) == content(generated)
    assert [path.name for path in tmp_path.iterdir()] == ["cubes"]

    generate_play(SETTINGS, output)  # is complete, and stays
    with pytest.raises(EnvError, match="holds a dataset with other settings: num_episodes was 3 and is 4"):
        generate_play(dataclasses.replace(SETTINGS, num_episodes=4), output)


# -- OGBench's own files ---------------------------------------------------------------------------------


def save(path: Path, rows: list[Rows], **changes: Callable[[np.ndarray], np.ndarray | None]) -> Path:
    """OGBench's file of some episodes, with arrays changed, or left out where the change returns None."""
    arrays = {name: np.concatenate([episode[name] for episode in rows]) for name in rows[0]}
    arrays |= {name: change(arrays[name]) for name, change in changes.items()}
    np.savez_compressed(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_an_import_gives_the_same_dataset(generated: Path, episodes: list[Rows], tmp_path: Path) -> None:
    file = save(tmp_path / "cube-double-play-v0.npz", episodes[:3])
    save(tmp_path / "cube-double-play-v0-val.npz", episodes[3:])
    output = tmp_path / "cubes"
    command = ["data", "ogbench", "--env", "cube-double", "--import", str(file), "--output", str(output)]
    assert main(command) == 0
    for split in ("train", "validation"):
        assert content(output / split) == content(generated / split)
    assert json.loads((output / "play.json").read_text()) == {"env": "cube-double", "imported": file.name}
    assert main(command) == 2  # the output exists already


def with_nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[7, 2] = np.nan
    return array


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qpos": lambda _: None}, r"play\.npz has no 'qpos'; expected the arrays observations, .* found observations"),
        (
            {"observations": lambda array: array[:, :28]},
            r"play\.npz: 'observations' is float32 \[36, 28\], expected numbers \[36, 37\].*--env",
        ),
        ({"qpos": lambda array: array[:, :23]}, r"'qpos' is float32 \[36, 23\], expected numbers \[36, 28\]"),
        ({"actions": lambda array: array[:-1]}, r"'actions' is float32 \[35, 5\], expected numbers \[36, 5\]"),
        ({"qpos": with_nan}, r"'qpos' must be finite, found NaN or infinity in 1 rows, the first is row 7"),
        ({"terminals": lambda array: array & False}, r"last row of 'terminals' must be true.* 0 terminals in 36 rows"),
        ({"terminals": lambda array: array.astype(object)}, r"play\.npz is not a whole \.npz file .*pickle"),
    ],
)
def test_wrong_files_are_refused(episodes: list[Rows], tmp_path: Path, changes: dict, message: str) -> None:
    file = save(tmp_path / "play.npz", episodes[:3], **changes)
    save(tmp_path / "play-val.npz", episodes[3:])
    with pytest.raises(DatasetError, match=message):
        import_play("cube-double", file, tmp_path / "cubes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["play-val.npz", "play.npz"]


def test_damaged_and_missing_files_are_refused(episodes: list[Rows], tmp_path: Path) -> None:
    file, output = tmp_path / "play.npz", tmp_path / "cubes"
    with pytest.raises(DatasetError, match=r"play\.npz: no such file"):
        import_play("cube-double", file, output)
    whole = save(file, episodes[:3]).read_bytes()
    with pytest.raises(DatasetError, match=r"play-val\.npz is missing: .* Put the validation file next to it"):
        import_play("cube-double", file, output)
    save(tmp_path / "play-val.npz", episodes[3:])
    for damaged in (whole[: len(whole) // 2], whole[:2000] + bytes(200) + whole[2200:]):
        file.write_bytes(damaged)
        with pytest.raises(DatasetError, match=rf"play\.npz is not a whole \.npz file \({len(damaged)} bytes\)"):
            import_play("cube-double", file, output)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "cube-doubel"], "no play dataset of 'cube-doubel'; expected one of cube-single, cube-double"),
        (["--env", "cube-double", "--episodes", "0"], "num_episodes"),
        (["--env", "cube-double", "--import", "play.npz", "--episodes", "5"], "leave out --episodes"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "ogbench", "--output", str(tmp_path / "cubes"), *flags]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # The states of the scene have another width. Without an environment, only the width can tell.
        (["--config", "qc_scene", "--env.id", "None", "--online_steps", "0"], "has 37 dims, but model.state_dim is 40"),
        (["--config", "qc_cube_triple"], "is play in cube-double"),
    ],
)
def test_play_of_another_environment_is_refused_and_leaves_nothing(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """Statistics that say "nothing is normalised" are written without being asked, but not before the data is right."""
    places = ["--data_dir", str(generated / "train"), "--data.assets_dir", str(tmp_path / "assets")]
    places += ["--checkpoint_dir", str(tmp_path / "runs"), "--exp_name", "wrong", "--tasks", "task1"]
    assert main(["train", *flags, *places]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "assets").exists()
