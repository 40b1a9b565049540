"""What a checkpoint says about itself is verified before a policy acts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tyro
from serving_helpers import state_observation
from small_checkpoints import make_agent, openpi_checkpoint, openpi_config, save_run, state_config

from acrlpd.checksums import ChecksumError
from acrlpd.cli.main import main
from acrlpd.cli.serve import ServeOptions
from acrlpd.config import save_config
from acrlpd.data.pipeline.norm_stats import NormStatsError
from acrlpd.policies.checkpoint import load_policy, open_checkpoint
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.serving.export import export_policy
from acrlpd.serving.serving_policy import load_serving_policy

STATS = Path("assets", "robot", "norm_stats.json")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of a run, and an export of it."""
    directory, config = tmp_path_factory.mktemp("intact"), state_config()
    run = save_run(directory / "run", config, {10: make_agent(config)})
    export_policy(run, directory / "export", critics="all")
    return {"run": run / "10", "export": directory / "export"}


@pytest.fixture(params=["run", "export"])
def checkpoint(intact: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(intact[request.param], tmp_path / "10")


def remove(path: Path) -> None:
    shutil.rmtree(path.parents[1])


def change(path: Path) -> None:
    path.write_text(path.read_text().replace("1", "2", 1))


def add(path: Path) -> None:
    shutil.copytree(path.parent, path.parents[1] / "other")


def test_whoever_loads_a_policy_in_python_keeps_its_compiled_programs(
    intact: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        load_policy(open_checkpoint(intact["run"]))
        assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_compilation_cache_dir", given)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove, r"assets/robot/norm_stats\.json is missing; expected a file with the SHA-256 [0-9a-f]{64}\n"),
        (change, r"assets/robot/norm_stats\.json has changed .* the SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}\n"),
        (add, r"assets/other/norm_stats\.json was added later: the policy was trained without"),
    ],
)
def test_statistics_that_are_not_those_of_the_training_are_refused(
    checkpoint: Path, damage: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    load_policy(open_checkpoint(checkpoint))
    damage(checkpoint / STATS)
    with pytest.raises(CheckpointError, match=problem) as error:
        load_policy(open_checkpoint(checkpoint))
    assert "Copy the file from another checkpoint of the run. --no_norm_stats acts without" in str(error.value)
    if (checkpoint / "run").exists():
        with pytest.raises(CheckpointError, match=problem):
            export_policy(checkpoint, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_statistics_behind_a_link_are_the_statistics(checkpoint: Path, tmp_path: Path) -> None:
    """A search of the directory does not follow links, and the policy would act without statistics."""
    directory = (checkpoint / STATS).parent
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    assert open_checkpoint(checkpoint).load_norm_stats() is not None
    change(checkpoint / STATS)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        open_checkpoint(checkpoint).load_norm_stats()


@pytest.mark.parametrize("command", ["serve", "eval", "export"])
def test_every_command_refuses_a_checkpoint_without_its_statistics(
    command: str, intact: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shutil.copytree(intact["run"], tmp_path / "10")
    remove(checkpoint / STATS)
    options = {"serve": ["--port", "0"], "eval": ["--env", "toy"], "export": ["--output", str(tmp_path / "out")]}
    assert main([command, str(checkpoint), *options[command]]) == 2
    error = capsys.readouterr().err
    assert error.count("norm_stats.json is missing") == 1 and "--no_norm_stats" in error and "Traceback" not in error


def test_without_statistics_a_policy_acts_only_when_told(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remove(checkpoint / STATS)
    told = open_checkpoint(checkpoint, no_norm_stats=True)
    assert told.load_norm_stats() is None
    assert "acts without norm statistics: states and actions are not scaled" in caplog.text
    if told.kind == "run":
        export_policy(checkpoint, tmp_path / "out", critics="all", no_norm_stats=True)
        assert not (tmp_path / "out" / "assets").exists()
        assert open_checkpoint(tmp_path / "out", no_norm_stats=True).load_norm_stats() is None
        with pytest.raises(CheckpointError, match=r"norm_stats\.json is missing"):  # an export has to be told as well
            open_checkpoint(tmp_path / "out").load_norm_stats()


def test_the_commands_can_be_told(intact: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = shutil.copytree(intact["run"], tmp_path / "10")
    remove(checkpoint / STATS)
    exported = ["--output", str(tmp_path / "out"), "--critics", "all"]
    assert main(["export", str(checkpoint), "--no_norm_stats", *exported]) == 0
    evaluated = ["--env", "toy", "--episodes", "1", "--num_workers", "0"]
    assert main(["eval", str(checkpoint), "--no_norm_stats", *evaluated]) == 0
    assert tyro.cli(ServeOptions, args=[str(checkpoint), "--no_norm_stats"]).no_norm_stats


def test_the_option_also_ignores_statistics_that_are_there(intact: dict[str, Path]) -> None:
    assert open_checkpoint(intact["run"]).load_norm_stats() is not None
    assert open_checkpoint(intact["run"], no_norm_stats=True).load_norm_stats() is None


def test_a_policy_that_was_trained_without_statistics_says_so(tmp_path: Path) -> None:
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config)}, norm_stats=False)
    assert open_checkpoint(run).load_norm_stats() is None
    other = save_run(tmp_path / "other", config, {10: make_agent(config)})
    shutil.copytree(other / "10" / "assets", run / "10" / "assets")
    with pytest.raises(CheckpointError, match="was added later: the policy was trained without"):
        open_checkpoint(run).load_norm_stats()


def test_of_an_openpi_checkpoint_only_missing_statistics_can_be_noticed(tmp_path: Path) -> None:
    step = openpi_checkpoint(tmp_path)
    shutil.rmtree(step / "assets")
    with pytest.raises(CheckpointError, match=r"has no assets/<asset_id>/norm_stats\.json.* --no_norm_stats acts"):
        open_checkpoint(step, openpi_config()).load_norm_stats()
    save_config(openpi_config(), tmp_path / "tiny.yaml")
    assert main(["eval", str(step), "--config", str(tmp_path / "tiny.yaml"), "--env", "toy"]) == 2
    assert open_checkpoint(step, openpi_config(), no_norm_stats=True).load_norm_stats() is None


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        ({}, "has no statistics of 'state', only"),
        ({"state": None}, "has no statistics of 'actions', only"),
        ({"state": None, "actions": 1}, "the statistics of 'actions' have 1 dims, the policy's actions have"),
    ],
)
def test_statistics_that_leave_actions_unscaled_are_refused(
    kept: dict[str, int | None], problem: str, tmp_path: Path
) -> None:
    step = openpi_checkpoint(tmp_path)
    [path] = (step / "assets").rglob("norm_stats.json")
    stats = json.loads(path.read_text())["norm_stats"]
    cut = {key: {name: x and x[:dims] for name, x in stats[key].items()} for key, dims in kept.items()}
    path.write_text(json.dumps({"norm_stats": cut}))
    with pytest.raises(NormStatsError, match=problem):
        open_checkpoint(step, openpi_config()).load_norm_stats()


def flip_bytes(path: Path) -> None:
    """Flips 8 bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    path.write_bytes(content)


@pytest.mark.parametrize("item", ["params", "critic"])
def test_flipped_bytes_are_not_served(checkpoint: Path, item: str) -> None:
    largest = max((checkpoint / item).rglob("d/*"), key=lambda path: path.stat().st_size)
    flip_bytes(largest)
    with pytest.raises(ChecksumError, match=f"{largest} has changed since it was written"):
        open_checkpoint(checkpoint).load_model()


@pytest.mark.parametrize("item", ["params", "critic"])
def test_a_checkpoint_without_checksums_is_not_served(checkpoint: Path, item: str) -> None:
    (checkpoint / item / "checksums.json").unlink()
    with pytest.raises(ChecksumError, match=rf"{item}/checksums\.json is missing"):
        open_checkpoint(checkpoint).load_model()


def test_a_changed_description_is_refused(checkpoint: Path) -> None:
    """A digit that flips leaves a description that can be read, of a policy that acts differently."""
    is_run = (checkpoint / "run").exists()
    file = checkpoint / "run" / "run.json" if is_run else checkpoint / "acrlpd.json"
    text = file.read_text()
    file.write_text(text.replace('"sampling_steps": 2', '"sampling_steps": 3'))
    assert file.read_text() != text
    with pytest.raises(CheckpointError, match=f"{file} has changed since it was written"):
        open_checkpoint(checkpoint)


def test_what_is_intact_acts_alike_with_and_without_the_state_of_the_training(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    """Serving reads and checks params/ and critic/ only, so damage elsewhere does not matter to a robot."""
    checkpoint = shutil.copytree(intact["run"], tmp_path / "10")
    shutil.rmtree(checkpoint / "train_state")
    replies: list[Any] = []
    for path in (intact["run"], checkpoint):
        policy = load_serving_policy(open_checkpoint(path))
        replies += policy.infer([policy.prepare(state_observation() | {"seed": 1})])
    np.testing.assert_array_equal(replies[0]["actions"], replies[1]["actions"])
