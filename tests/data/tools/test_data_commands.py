"""`acrlpd data`: what a user sees of a dataset, from the command line."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from acrlpd.cli import data
from acrlpd.cli.main import _run_group
from acrlpd.data.frames.store import FrameCache
from acrlpd.data.sources.source import DatasetError, Feature, open_source
from acrlpd.data.tools.inspect import inspect_source
from acrlpd.data.tools.lerobot_writer import LeRobotWriter


def run(*args: object) -> int:
    return _run_group("acrlpd data", "datasets", data, [str(arg) for arg in args])


def test_inspect_reports_what_is_there(datasets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", datasets / "aloha_v30", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["episodes"], report["frames"], report["fps"]) == ("LeRobot v3.0", 12, 1542, 50)
    assert report["lengths"] == {"min": 100, "median": 130.5, "mean": 128.5, "max": 156}
    assert report["prompts"] == {"Insert peg into socket": 792, "Transfer cube": 750}
    assert report["success_rate"] == 0.75
    assert report["outcomes"] == {"successes": 9, "failures": 0, "neither": 3}  # The columns name no time limit.
    assert report["reward_histogram"] == [[0.0, 0.0, 1533], [1.0, 1.0, 9]]
    assert report["cameras"] == ["observation.images.cam_high"]
    assert report["features"]["action"] == {"dtype": "float32", "shape": [14]}
    assert set(report["ranges"]) == {"action", "observation.state"}
    assert report["ranges"]["action"]["max"][0] == pytest.approx(1, abs=1e-3)
    assert report["warnings"] == []
    assert report["skipped"] == []


def test_inspect_is_readable(datasets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", datasets / "libero_v21")
    text = " ".join(capsys.readouterr().out.split())
    assert "6 episodes, 315 steps at 10 fps" in text
    assert "prompt 'open the drawer'" in text
    assert "warning the dataset says nothing about rewards" in text


def test_inspect_shows_escape_sequences_and_does_not_obey_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = "\x1b[2J\x1b]0;title\x07"
    root = tmp_path / f"data {nasty}"
    features = {"observation.state": Feature("float32", (3,)), "action": Feature("float32", (3,))}
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for _ in range(12):
            writer.add_step({name: np.zeros(3) for name in features}, {})
        writer.end_episode(f"task {nasty}")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("inspect", root) == 0
    shown = capsys.readouterr().out
    assert not re.search("\x1b(?!\\[[0-9;]*m)|\x07", shown)  # colours alone
    plain = " ".join(re.sub("\x1b\\[[0-9;]*m", "", shown).split())
    for words in ("data", "task"):
        assert rf"{words} \x1b[2J" in plain


def test_inspect_leaves_broken_episodes_out_and_lists_them(copy_dataset, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_dataset("aloha_v21")
    (root / "data" / "chunk-000" / "episode_000005.parquet").unlink()
    run("inspect", root, "--json")
    report = json.loads(capsys.readouterr().out)
    assert (report["episodes"], report["skipped"][0]["index"]) == (11, 5)
    assert "1 broken episodes were skipped" in report["warnings"]
    with pytest.raises(DatasetError, match=r"episode_000005.parquet: episode 5: the data file is missing"):
        run("inspect", root, "--on-bad-episode", "error")


def test_inspect_warns_of_what_would_spoil_training(tmp_path: Path) -> None:
    features = {"observation.state": Feature("float32", (3,)), "action": Feature("float32", (3,))}
    features["next.success"] = Feature("bool", ())
    rng = np.random.default_rng(0)
    with LeRobotWriter(tmp_path / "data", fps=10, features=features) as writer:
        for length in (200, 200, 4):
            for t in range(length):
                state = np.array([rng.normal(), 0.5, 1e-5 * rng.normal()])
                action = np.append(rng.normal(size=2), 1e4 if t == 3 else rng.normal())
                columns = {"observation.state": state, "action": action, "next.success": t == length - 1}
                writer.add_step(columns, {})
            writer.end_episode("push")
    warnings = "\n".join(inspect_source(open_source(tmp_path / "data")).warnings)
    assert "observation.state: dims [1, 2] are (nearly) constant" in warnings
    assert "action: dims [2] have outliers" in warnings
    assert "1 episodes have fewer than 10 steps: [2]" in warnings
    assert "every episode is a success" in warnings
    assert "no cameras" in warnings


def test_a_success_column_about_whole_episodes_becomes_labels(tmp_path: Path) -> None:
    root = tmp_path / "data"
    features = {"observation.state": Feature("float32", (2,)), "action": Feature("float32", (2,))}
    features["next.success"] = Feature("bool", ())
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for success in (True, False, True):
            for t in range(20):
                values = np.array([t, -t])
                writer.add_step({"observation.state": values, "action": values, "next.success": success}, {})
            writer.end_episode("push")
    report = inspect_source(open_source(root))
    (rule,) = [re.search(r"--rule '(.*)'", warning) for warning in report.warnings if "how an episode ends" in warning]
    assert report.success_rate is None and rule is not None
    run("label", root, "--rule", rule[1])
    assert inspect_source(open_source(root)).success_rate == pytest.approx(2 / 3)


def test_brackets_in_names_and_prompts_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, name = tmp_path / "set [bold]", "state[red]"
    features = {name: Feature("float32", (2,)), "action": Feature("float32", (2,))}
    features["top"] = Feature("video", (32, 32, 3))
    with LeRobotWriter(root, fps=10, features=features, codec="h264") as writer:
        for _ in range(3):
            for t in range(4):
                values = np.array([t, t * t], np.float32)
                writer.add_step({name: values, "action": values}, {"top": np.zeros((32, 32, 3), np.uint8)})
            writer.end_episode("pick [red] cup")
    monkeypatch.setenv("COLUMNS", "500")
    run("inspect", root)
    shown = capsys.readouterr().out
    assert f"{root}: LeRobot" in shown
    assert "prompt 'pick [red] cup'" in shown
    assert shown.count(name) == 2  # among the features, and above its ranges
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nq\n"))
    run("label", root, "--interactive")
    shown = capsys.readouterr().out
    assert "task: pick [red] cup" in shown
    assert "success? (y)es, (n)o, (s)kip, (q)uit: " in shown
    assert f"{root}.labels.json: 1 of 3" in shown
    next((root / "videos").rglob("*.mp4")).unlink()
    run("validate", root)
    assert f"broken {root}" in capsys.readouterr().out


def test_the_contact_sheet_shows_frames(datasets: Path, tmp_path: Path) -> None:
    run("inspect", datasets / "libero_v30", "--contact-sheet", tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (6 * (120 + 14), 2 * 3 * 160, 3)
    tiles = [sheet[14 + row * 134 : 134 + row * 134, k * 160 : (k + 1) * 160] for row in range(6) for k in range(6)]
    assert all(tile.std() > 20 for tile in tiles)
    assert len({tile.tobytes() for tile in tiles}) == 36


def test_cache_then_validate(datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_dir = tmp_path / "cache"
    size = ("--height", 32, "--width", 48)
    assert run("cache", datasets / "libero_v30", cache_dir, *size, "--cameras", "wrist_image", "--format", "jpeg") == 0
    source = open_source(datasets / "libero_v30")
    cache = FrameCache(cache_dir, source, cameras=("wrist_image",), height=32, width=48)
    assert cache.spec.encoding == "jpeg"
    capsys.readouterr()
    assert run("validate", source.root, "--cache-dir", cache_dir, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["problems"]) == (6, [])
    assert "the frames between the first and the last" in found["not_looked_at"]


def test_a_cache_of_frames_without_size_is_refused(datasets: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"frames of 0x224 cannot be cached"):
        run("cache", datasets / "libero_v30", tmp_path / "cache", "--height", 0)
    assert not (tmp_path / "cache").exists()


def test_validate_lists_everything_that_is_wrong(copy_dataset, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_dataset("aloha_v21")
    camera = root / "videos" / "chunk-000" / "observation.images.cam_high"
    (camera / "episode_000002.mp4").unlink()
    (root / "data" / "chunk-000" / "episode_000007.parquet").unlink()
    assert run("validate", root, "--frames", "none", "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 2
    assert "episode_000002.mp4: episode 2" in problems[0]
    assert "episode_000007.parquet: episode 7" in problems[1]
    assert run("validate", root, "--cache-dir", root / "no-cache") == 1
    assert "no finished frame cache" in " ".join(capsys.readouterr().out.split())


def test_validate_decodes_all_frames_when_asked(copy_dataset, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_dataset("aloha_v21")
    video = root / "videos" / "chunk-000" / "observation.images.cam_high" / "episode_000002.mp4"
    data = video.read_bytes()
    video.unlink()
    video.write_bytes(data[: len(data) // 2] + bytes(3000) + data[len(data) // 2 + 3000 :])
    assert run("validate", root) == 0
    assert "not looked at: the frames between the first and the last" in " ".join(capsys.readouterr().out.split())
    assert run("validate", root, "--frames", "all") == 1
    assert "not looked at: nothing; but a file without checksums" in " ".join(capsys.readouterr().out.split())


def test_convert(datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--task", "Transfer cube", "--codec", "h264", "--robot-type", "aloha")
    assert run("convert", datasets / "aloha_hdf5_sim_raw", tmp_path / "new", *arguments) == 0
    assert open_source(tmp_path / "new").episode(1).prompt == "Transfer cube"
    assert "2 episodes, 0 skipped" in " ".join(capsys.readouterr().out.split())


def test_label_by_list_and_by_rule(copy_dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_dataset("libero_v30")
    assert run("label", root, "--rule", "length < 60", "--failure", "0,2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 of 6 episodes labelled (successes: 2, failures: 4, neither: 0)" in shown
    assert "set data.rewards.failure_reward" in shown
    report = inspect_source(open_source(root))
    assert report.success_rate == pytest.approx(2 / 6)
    assert report.outcomes == {"successes": 2, "failures": 4, "neither": 0}
    with pytest.raises(DatasetError, match=r"say how to label"):
        run("label", root)


def test_labels_that_are_not_complete_are_counted(copy_dataset, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_dataset("libero_v30")
    assert run("label", root, "--success", "0-1") == 0
    assert "failure_reward" not in capsys.readouterr().out  # There is no failure yet.
    assert run("label", root, "--failure", "4") == 0
    counts = "successes: 2, failures: 1, neither: 3"
    assert f"3 of 6 episodes labelled ({counts})" in " ".join(capsys.readouterr().out.split())
    run("inspect", root)
    shown = " ".join(capsys.readouterr().out.split())
    assert counts in shown
    assert "3 of 6 episodes have no label" in shown


def test_label_with_rewards(copy_dataset, tmp_path: Path) -> None:
    root = copy_dataset("libero_v30")
    run("label", root, "--success", "0-3", "--failure", "4,5", "--reward", "1-2=0.5,4=-1")
    episodes = json.loads((tmp_path / "libero_v30.labels.json").read_text())["episodes"]
    rewards = [episodes[str(i)].get("reward") for i in range(6)]
    assert rewards == [None, 0.5, 0.5, None, -1, None]
    run("label", root, "--reward", "3=2")
    episodes = json.loads((tmp_path / "libero_v30.labels.json").read_text())["episodes"]
    assert (episodes["3"]["success"], episodes["3"]["reward"], episodes["1"]["reward"]) == (True, 2, 0.5)
    (tmp_path / "libero_v30.labels.json").unlink()
    with pytest.raises(ValueError, match=r"episodes \[3\] have no label yet"):
        run("label", root, "--reward", "3=2")
    for wrong in ("0=nan", "1"):
        with pytest.raises(ValueError, match=rf"rewards like 0-9=1,12=0.5; found '{wrong}'"):
            run("label", root, "--success", "0-5", "--reward", wrong)


def test_label_interactively(copy_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy_dataset("libero_v30")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\ns\ny\nq\n"))
    run("label", root, "--interactive", "--camera", "wrist_image")
    episodes = json.loads((tmp_path / "libero_v30.labels.json").read_text())["episodes"]
    assert {index: entry["success"] for index, entry in episodes.items()} == {"0": True, "1": False, "3": True}


def test_the_end_of_the_answers_is_the_end_of_labelling(
    copy_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_dataset("libero_v30")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\n"))
    assert run("label", root, "--interactive") == 0
    episodes = json.loads((tmp_path / "libero_v30.labels.json").read_text())["episodes"]
    assert list(episodes) == ["0", "1"]


def test_who_labels_nothing_leaves_the_rewards_of_the_dataset_alone(
    copy_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_dataset("aloha_v30")
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    assert run("label", root, "--interactive") == 0
    with pytest.raises(DatasetError, match=r"no camera 'nope'"):
        run("label", root, "--interactive", "--camera", "nope")
    assert not (tmp_path / "aloha_v30.labels.json").exists()
    assert inspect_source(open_source(root)).success_rate == 0.75


def test_statistics_and_labels_go_without_a_broken_episode_when_told_to(
    copy_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = copy_dataset("libero_v21")
    (root / "data" / "chunk-000" / "episode_000002.parquet").unlink()
    stats = ("stats", "--config", "libero", "--data-dir", root)
    label = ("label", root, "--rule", "max(state[0]) < 100")
    for command, flag in ((stats, "--data.on-bad-episode"), (label, "--on-bad-episode")):
        with pytest.raises(DatasetError, match="episode 2: the data file is missing"):
            run(*command)
        assert run(*command, flag, "skip") == 0
    assert (tmp_path / "assets" / "libero_v21" / "norm_stats.json").is_file()
    episodes = json.loads((tmp_path / "libero_v21.labels.json").read_text())["episodes"]
    assert list(episodes) == ["0", "1", "3", "4", "5"]


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in data.COMMANDS:
        with pytest.raises(SystemExit) as stop:
            run(name, "--help")
        assert stop.value.code == 0
        assert f"acrlpd data {name}" in capsys.readouterr().out
