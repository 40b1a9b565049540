"""`acrlpd runs verify`: every damaged file of a run, a checkpoint or an export is found and named, and no other."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from small_checkpoints import make_agent, openpi_checkpoint, save_run, state_config

from acrlpd.checksums import stored_checksum, write_checksums, write_json_with_checksum
from acrlpd.cli.main import main
from acrlpd.data.pipeline.replay import Replay
from acrlpd.data.sources.source import Feature
from acrlpd.runs.directory import write_run_config
from acrlpd.serving.export import export_policy
from acrlpd.training.online.records import Round

ROUND = Round(
    number=0,
    episodes=(0, 1),
    lengths=(4, 4),
    checksums=(),  # are those of the files that `write_replay` writes
    successes=(True, False),
    returns=(1.0, 0.0),
    lost_episodes=0,
    policy_step=3,
)


def write_replay(directory: pathlib.Path) -> None:
    features = {"action": Feature("float32", (2,)), "side": Feature("video", (16, 16, 3))}
    replay = Replay(directory, features, fps=10)
    for number in ROUND.episodes:
        frames = np.full((4, 16, 16, 3), 50 * number, np.uint8)
        replay.write(number, {"action": np.ones((4, 2), np.float32), "side": frames}, "go")
    checksums = tuple(stored_checksum(directory / f"episode-0000000{number}-4.npz") for number in ROUND.episodes)
    played = dataclasses.replace(ROUND, checksums=checksums)
    write_json_with_checksum(directory / "round-000000.json", dataclasses.asdict(played))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a run that has two checkpoints, a replay and a baseline, and with an export."""
    directory, config = tmp_path_factory.mktemp("intact"), state_config()
    agent = make_agent(config)
    run = save_run(directory / "run", config, {10: agent, 20: agent})
    save_run(run / "baselines" / "bc", config, {10: agent})
    for path in (run, run / "baselines" / "bc"):
        write_run_config(path, config)
        (path / "metrics.jsonl").write_text('{"step": 10, "phase": "offline", "bc_loss": 1.0}\n')
    write_replay(run / "replay")
    export_policy(run, directory / "export", critics="all")
    return directory


@pytest.fixture
def copied(intact: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(intact, tmp_path / "copied")


def verify(directory: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit code, and the problems."""
    code = main(["runs", "verify", str(directory), "--json"])
    return code, json.loads(capsys.readouterr().out)["problems"]


@pytest.mark.parametrize("name", ["run", "run/10", "run/baselines/bc", "export"])
def test_what_is_intact_has_no_problem(
    intact: pathlib.Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["runs", "verify", str(intact / name)]) == 0
    shown = capsys.readouterr().out
    assert "problems: 0" in shown and "damaged" not in shown
    expected = {
        "run": ["10/run/run.json and assets", "20/train_state", "replay/ episodes", "baselines/bc/10/params"],
        "run/10": ["run/run.json and assets", "params", "critic", "train_state"],
        "run/baselines/bc": ["config and metrics", "10/critic"],
        "export": ["acrlpd.json and assets", "params", "critic"],
    }
    assert [part for part in expected[name] if part not in shown] == []


def flip_last_byte(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)


def largest(directory: pathlib.Path) -> pathlib.Path:
    return max((path for path in directory.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)


FILES: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "params": lambda run: largest(run / "10/params"),
    "train_state": lambda run: largest(run / "20/train_state"),
    "metadata of critic": lambda run: run / "20/critic/_METADATA",
    "run.json": lambda run: run / "10/run/run.json",
    "norm statistics": lambda run: run / "20/assets/robot/norm_stats.json",
    "baseline": lambda run: largest(run / "baselines/bc/10/critic"),
    "episode": lambda run: run / "replay/episode-00000001-4.npz",
    "frames": lambda run: run / "replay/episode-00000000.side.jpegs",
    "round": lambda run: run / "replay/round-000000.json",
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_run_is_named(copied: pathlib.Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = FILES[name](copied / "run")
    flip_last_byte(file)
    code, [problem] = verify(copied / "run", capsys)
    assert code == 1 and str(file) in problem


@pytest.mark.parametrize("name", [name for name in FILES if name != "round"])
def test_a_missing_file_of_a_run_is_named(copied: pathlib.Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = FILES[name](copied / "run")
    file.unlink()
    code, [problem] = verify(copied / "run", capsys)
    assert code == 1
    assert str(file) in problem or problem == f"{file.parents[1]} is not a checkpoint of a run: it has no run/run.json"


def test_rounds_that_a_checkpoint_has_learned_from_must_be_there(
    copied: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied / "run" / "20" / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"online": {"rounds": 2}}))
    write_checksums(file.parent)
    code, [problem] = verify(copied / "run", capsys)
    assert code == 1
    assert "has the records of 1 rounds, but the checkpoint of step 20 has learned from 2" in problem


@pytest.mark.parametrize("name", ["acrlpd.json", "params/manifest.ocdbt", "assets/robot/norm_stats.json"])
def test_a_damaged_file_of_an_export_is_named(
    copied: pathlib.Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_last_byte(copied / "export" / name)
    code, [problem] = verify(copied / "export", capsys)
    assert code == 1 and str(copied / "export" / name) in problem


def test_every_problem_has_a_line(copied: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "run" / "10" / "assets")
    flip_last_byte(largest(copied / "run" / "20" / "params"))
    (copied / "run" / "metrics.jsonl").write_text("[]\n")
    assert main(["runs", "verify", str(copied / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("1 problem" in line for line in lines) == 3
    assert [line for line in lines if line.startswith("damaged ")] == [line for line in lines if "damaged" in line]
    assert len([line for line in lines if line.startswith("damaged ")]) == 3
    assert lines[-1] == f"{copied / 'run'}: 17 parts checked; problems: 3"


def test_an_export_that_lost_its_critics(copied: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "export" / "critic")
    assert verify(copied / "export", capsys) == (
        1,
        [f"{copied / 'export' / 'critic'} is missing: the checkpoint says that it has critics"],
    )


def test_what_cannot_be_verified_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "verify", str(openpi_checkpoint(tmp_path))]) == 2
    assert "of a plain openpi checkpoint, which has no checksums, nothing can be verified" in capsys.readouterr().err
    assert main(["runs", "verify", str(tmp_path)]) == 2
    assert "is neither a run" in capsys.readouterr().err
    assert main(["runs", "verify", str(tmp_path / "nothing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
