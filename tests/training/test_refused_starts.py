"""A run that cannot begin: all that is wrong is said at once, before anything long, and nothing is left behind."""

import tarfile
from pathlib import Path

import pytest

from acrlpd.cli.main import main
from acrlpd.config import apply_config_overrides
from acrlpd.config.yaml_files import parse_config
from acrlpd.training.demonstrations import collect_missing_demonstrations

DATASETS = Path(__file__).parents[1] / "datasets"


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(DATASETS / "libero_v30.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "libero_v30"


CONFIG = """
base_config: debug
name: mine
model: {image_keys: [base_0_rgb, left_wrist_0_rgb]}
data:
  data_dir: libero_v30
  robot: libero
  repack: {base_0_rgb: image, left_wrist_0_rgb: wrist_image, state: [state], actions: [actions]}
"""


def test_everything_that_is_wrong_is_said_at_once(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config, the tokenizer, cameras, labels, prompts, dims, statistics and weights."""
    (dataset.parent / "mine.yaml").write_text(CONFIG)
    stats = ("--data.use-delta-joint-actions", "--data.delta-action-mask", "6", "-1")
    assert main(["data", "stats", "--config", "mine.yaml", *stats]) == 0
    wrong = {
        "--batch_size": "7",
        "--gradient_accumulation_steps": "2",
        "--data.tokenizer": "no.model",
        "--data.repack.base_0_rgb": "front",
        "--data.repack.left_wrist_0_rgb": "hand",
        "--data.robot": "generic",
        "--qchunking.action_dim": "6",
        "--weight_loader.kind": "checkpoint",
        "--weight_loader.path": "nowhere",
    }
    capsys.readouterr()
    assert main(["train", "--config", "mine.yaml", *(part for pair in wrong.items() for part in pair)]) == 2
    shown = capsys.readouterr()
    for expected in (
        "cannot run (7 errors)",
        "batch_size 7 does not split into 2 micro-batches",
        "tokenizer is not at no.model",
        "data.repack.base_0_rgb names the camera 'front', data.repack.left_wrist_0_rgb names the camera 'hand'; ",
        "the dataset says nothing about rewards",
        "the actions ('actions',) have 7 dims, but qchunking.action_dim is 6",
        "the norm statistics were made with other transforms",
        "nowhere does not exist: expected the directory of a checkpoint",
    ):
        assert expected in shown.err
    assert "per device" not in shown.out  # The plan comes after the errors.
    assert not Path("checkpoints").exists()


def test_columns_that_do_not_exist_are_all_named(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dataset.parent / "mine.yaml").write_text(
        CONFIG.replace("state: [state], actions: [actions]", "state: [a], actions: [b]")
    )
    assert main(["train", "--config", "mine.yaml"]) == 2
    assert "data.repack names the columns ['a', 'b']; libero_v30 has ['state', 'actions'," in capsys.readouterr().err


def test_a_dry_run_writes_no_statistics(dataset: Path) -> None:
    """Demonstrations whose collection was killed before the statistics were written."""
    config = apply_config_overrides(parse_config(CONFIG), {"data.demonstrations.num_episodes": 1, "env.id": "corridor"})
    collect_missing_demonstrations(config, dry_run=True)
    assert not Path("assets").exists()


@pytest.mark.parametrize("was_there", [False, True])
def test_a_start_that_fails_late_leaves_nothing(
    was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment is made after the directory of the run."""
    monkeypatch.chdir(tmp_path)
    if was_there:
        (tmp_path / "runs" / "debug").mkdir(parents=True)
    flags = ("--env.id", "no_such_environment", "--checkpoint_dir", "runs", "--exp_name", "first")
    assert main(["train", "--config", "debug", *flags]) == 2
    assert "no_such_environment" in capsys.readouterr().err
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == (["runs", "runs/debug"] if was_there else [])
