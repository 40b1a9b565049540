"""Config, tables of episodes and films in every dashboard, with the real packages; trackio without a network."""

import json
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from monitoring_helpers import state_config
from test_writers import events

from acrlpd.envs.episodes import write_video
from acrlpd.monitoring.judged_episodes import read_judged_episodes, to_gif
from acrlpd.monitoring.writers import Writers

EPISODES = [
    {"seed": 5, "task": "lift | it", "success": True, "total_reward": 1.0, "length": 12},
    {"seed": 6, "task": "lift | it", "success": False, "total_reward": 0.0, "length": 40},
]


@pytest.fixture(scope="module")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """trackio reads its directory when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield pytest.importorskip("trackio.sqlite_storage").SQLiteStorage


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run directory with an evaluation at step 10 and one film."""
    directory = tmp_path / "run"
    evaluation = directory / "evaluations" / "10"
    video = evaluation / "videos" / "lift-5-success.mp4"
    frames = np.zeros((90, 48, 64, 3), np.uint8)
    frames[:, :, :, 0] = np.linspace(0, 255, 90, dtype=np.uint8)[:, None, None]
    write_video(video, frames, 30.0)
    content = {"success_rate": 0.5, "per_episode": EPISODES, "videos": [str(video)]}
    (evaluation / "evaluation.json").write_text(json.dumps(content))
    return directory


def write_run(directory: pathlib.Path, step: int = 10, **settings: Any) -> Writers:
    writers = Writers(state_config(directory, **settings), directory)
    writers.open(-1)
    writers.write({"step": step, "q_mean": 0.5})
    writers.write({"step": step, "eval/success_rate": 0.5})
    return writers


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # threads and processes of others write
        time.sleep(0.05)


def test_a_film_as_a_moving_picture(run: pathlib.Path) -> None:
    episodes = read_judged_episodes(run, 10)
    assert episodes is not None and episodes.rows[1] == (6, "lift | it", False, 0.0, 40)
    content, size = to_gif(episodes.videos[0])
    assert content.startswith(b"GIF89a") and size == (64, 48)
    assert read_judged_episodes(run, 20) is None


def test_tensorboard(run: pathlib.Path) -> None:
    write_run(run, logging__tensorboard=True).close()
    values = [value for event in events(run / "tensorboard") for value in event.summary.value]
    by_tag = {value.tag: value for value in values}
    table = by_tag["eval/episodes_table/text_summary"].tensor.string_val[0].decode()
    head, line, first, _ = table.splitlines()
    assert head == "| seed | task | success | total_reward | length |" and set(line) == {"|", "-", " "}
    assert "lift \\| it" in first
    assert by_tag["videos/0"].image.encoded_image_string.startswith(b"GIF89a")
    assert b"critic.num_critics" in by_tag["_hparams_/session_start_info"].metadata.plugin_data.content
    assert b"eval/success_rate" in by_tag["_hparams_/experiment"].metadata.plugin_data.content


def test_wandb(run: pathlib.Path) -> None:
    pytest.importorskip("wandb")
    write_run(run, logging__wandb="offline").close()
    [files] = run.glob("wandb/offline-run-*/files/media")
    wait_for(lambda: bool(list(files.rglob("*.mp4"))) and bool(list(files.rglob("*.table.json"))))
    [table] = files.rglob("*.table.json")
    assert json.loads(table.read_text())["columns"] == list(EPISODES[0])


def test_trackio_needs_no_network_and_goes_on_with_the_same_run(
    run: pathlib.Path, trackio: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*address: Any) -> None:
        raise AssertionError(f"trackio reaches for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    settings = {"logging__trackio": True, "logging__project_name": "project"}
    write_run(run, **settings).close()
    restarted = Writers(state_config(run, **settings), run)
    restarted.open(10)
    restarted.write({"step": 20, "q_mean": 0.75})
    restarted.close()
    assert capsys.readouterr().out == ""
    name = (run / "trackio_run.txt").read_text()
    assert trackio.get_runs("project") == [name]
    logs = trackio.get_logs("project", name)
    assert [(line["step"], line["train/q_mean"]) for line in logs if "train/q_mean" in line] == [(10, 0.5), (20, 0.75)]
    [table] = [line["eval/episodes_table"] for line in logs if "eval/episodes_table" in line]
    assert [row["seed"] for row in table["_value"]] == [5, 6]
    [video] = [line["videos/0"] for line in logs if "videos/0" in line]
    assert video["caption"] == "lift-5-success"
    assert trackio.get_run_config("project", name)["critic.num_critics"] == state_config(run).critic.num_critics


def test_two_runs_of_one_process_have_their_own_runs_in_trackio(tmp_path: pathlib.Path, trackio: Any) -> None:
    settings = {"logging__trackio": True, "logging__project_name": "two"}
    opened = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        opened.append(write_run(tmp_path / name, **settings))
    for writers in opened:
        writers.write({"step": 20, "q_mean": 1.0})
        writers.close()
    for name in ("first", "second"):
        logs = trackio.get_logs("two", (tmp_path / name / "trackio_run.txt").read_text())
        assert [line["step"] for line in logs if "train/q_mean" in line] == [10, 20]


def test_a_damaged_record_is_reported_and_stops_nothing(run: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "evaluations" / "10" / "evaluation.json").write_text("{")
    write_run(run, logging__tensorboard=True).close()
    assert "evaluation.json is damaged" in caplog.text and len(caplog.records) == 1
