"""`acrlpd data stats`: whose statistics are written where, and what is never replaced."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from acrlpd.cli.data import stats
from acrlpd.cli.train import TrainOptions
from acrlpd.cli.train import main as train
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.labels import Labels, labels_path
from acrlpd.data.pipeline.norm_stats import NormStatsError
from acrlpd.data.sources.source import open_source
from acrlpd.data.tools.label import label_rule

ALOHA = ("--config", "aloha", "--model.image_keys", "base_0_rgb")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: object) -> int:
    return stats([str(arg) for arg in args])


def test_the_statistics_are_those_of_the_dataset_and_have_its_name(datasets: Path, tmp_path: Path) -> None:
    assert run("--config", "libero", "--data_dir", datasets / "libero_v30") == 0
    written = json.loads((tmp_path / "assets" / "libero_v30" / "norm_stats.json").read_text())
    state = open_source(datasets / "libero_v30").read_columns(["state"]).columns["state"]
    np.testing.assert_allclose(written["norm_stats"]["state"]["mean"][:8], state.mean(axis=0), atol=1e-4)


def test_datasets_of_one_robot_do_not_share_statistics(datasets: Path, tmp_path: Path) -> None:
    for name in ("aloha_v21", "aloha_hdf5_sim_raw"):
        assert run(*ALOHA, "--data-dir", datasets / name) == 0
    assert {path.name for path in (tmp_path / "assets").iterdir()} == {"aloha_v21", "aloha_hdf5_sim_raw"}


def test_every_flag_of_the_dataset_that_train_takes_is_taken(datasets: Path, tmp_path: Path) -> None:
    flags = ("--data.assets_dir", "elsewhere", "--data.asset_id", "mine", "--data.no-use-delta-joint-actions")
    assert run(*ALOHA, "--data_dir", datasets / "aloha_v30", *flags) == 0
    origin = json.loads((tmp_path / "elsewhere" / "mine" / "norm_stats_origin.json").read_text())
    assert origin["transforms"]["delta_action_mask"] is None
    assert origin["path"] == str((datasets / "aloha_v30").resolve())


def test_only_flags_that_are_no_fields_of_a_config_are_those_of_train_alone(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for command in (train, stats):
        with pytest.raises(SystemExit):
            command(["--config", "debug", "--help", "all"])
        shown.append(set(re.findall(r"^\W+--([\w.-]+)", capsys.readouterr().out, re.MULTILINE)))
    own = {field.name.replace("_", "-") for field in dataclasses.fields(TrainOptions)} - {"overwrite"}
    of_train, of_stats = shown
    assert of_train - of_stats == own and of_stats <= of_train
    assert {"data-dir", "lerobot-repo-id", "data.asset-id", "data.repack.state", "model.action-horizon"} <= of_stats


@pytest.mark.parametrize("asset_id", ["../outside", "a/../../outside", "/tmp/outside"])
def test_statistics_stay_within_the_assets(datasets: Path, tmp_path: Path, asset_id: str) -> None:
    with pytest.raises(ValueError, match=r"data.asset_id is .*, expected plain names .*within assets"):
        run("--config", "libero", "--data-dir", datasets / "libero_v30", "--data.asset-id", asset_id)
    assert not list(tmp_path.iterdir()) and not Path("/tmp/outside").exists()


def test_statistics_of_another_dataset_are_replaced_only_when_told_to(datasets: Path, tmp_path: Path) -> None:
    of_first = (*ALOHA, "--data_dir", datasets / "aloha_v30", "--data.asset_id", "shared")
    of_second = (*ALOHA, "--data_dir", datasets / "aloha_hdf5_sim_raw", "--data.asset_id", "shared")
    directory = tmp_path / "assets" / "shared"
    assert run(*of_first) == 0
    assert run(*of_first) == 0  # the same dataset may be counted again
    before = (directory / "norm_stats.json").read_bytes()
    with pytest.raises(NormStatsError, match=r"of another dataset \(.*aloha_v30, 1542 frames\).* --overwrite"):
        run(*of_second)
    assert (directory / "norm_stats.json").read_bytes() == before
    assert run(*of_second, "--overwrite") == 0
    assert (directory / "norm_stats.json").read_bytes() != before


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--model.action_horizon", "30"), "action_horizon: statistics 20, this run 30"),
        (("--data.no-use-delta-joint-actions",), "delta_action_mask: statistics .*, this run absolute actions"),
    ],
)
def test_statistics_of_another_config_are_replaced_only_when_told_to(
    datasets: Path, tmp_path: Path, flags: tuple[str, ...], difference: str
) -> None:
    of_first = (*ALOHA, "--data_dir", datasets / "aloha_v30")
    assert run(*of_first) == 0
    file = tmp_path / "assets" / "aloha_v30" / "norm_stats.json"
    before = file.read_bytes()
    with pytest.raises(NormStatsError, match=rf"{difference}.*--data.asset_id NAME.*--overwrite"):
        run(*of_first, *flags)
    assert file.read_bytes() == before
    assert run(*of_first, *flags, "--overwrite") == 0
    assert file.read_bytes() != before


def test_released_statistics_are_not_replaced(goldens: Path, datasets: Path, tmp_path: Path) -> None:
    released = tmp_path / "assets" / "trossen"
    shutil.copytree(goldens / "norm_stats_example", released)
    before = (released / "norm_stats.json").read_bytes()
    with pytest.raises(NormStatsError, match=r"did not make, for example those of released weights.*--data.asset_id"):
        run(*ALOHA, "--data_dir", datasets / "aloha_v30", "--data.asset_id", "trossen")
    assert (released / "norm_stats.json").read_bytes() == before


def test_training_refuses_statistics_of_another_dataset_of_the_same_name(
    datasets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two datasets may both be called `train`. Statistics that the config names itself may be meant, and only warn."""
    first, second = tmp_path / "a" / "train", tmp_path / "b" / "train"
    shutil.copytree(datasets / "libero_v21", first)
    shutil.copytree(datasets / "libero_v30", second)
    Labels(labels_path(second), label_rule(open_source(second), "length > 0")).save()
    assert run("--config", "libero", "--data_dir", first) == 0
    config = apply_config_overrides(
        get_config("libero"), {"data.data_dir": str(second), "data.tokenizer": "byte", "data.num_workers": 0}
    )
    with pytest.raises(NormStatsError, match=r"made from the dataset .*/a/train, this run trains on .*/b/train"):
        open_dataset(config)
    open_dataset(apply_config_overrides(config, {"data.asset_id": "train"}))
    assert f"were made from the dataset {first}" in caplog.text
