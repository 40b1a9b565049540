"""The files that users are shown: valid, of the size they say, and good for an ALOHA dataset."""

import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acrlpd.cli.main import COMMANDS, main
from acrlpd.config import apply_config_overrides, load_config, validate_config
from acrlpd.config.plan.plan import make_plan
from acrlpd.config.yaml_files import parse_config
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_aloha.yaml"
SMALL = ROOT / "examples" / "small_arm.yaml"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    with tarfile.open(ROOT / "tests" / "datasets" / "aloha_hdf5_sim_raw.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "aloha_hdf5_sim_raw"


def test_it_is_valid_and_fits_one_gpu() -> None:
    config = load_config(EXAMPLE)
    gib = int(re.search(r"one GPU of (\d+) GB", EXAMPLE.read_text()).group(1))  # type: ignore[union-attr]
    found = validate_config(config, num_devices=1)
    assert found.errors == ()
    assert found.warnings == (f"data.data_dir {config.data.data_dir} does not exist; name the directory of a dataset",)
    plan = make_plan(config, device_memory_gib=gib)
    assert plan.memory.peak < 0.95 * plan.usable_bytes


def test_the_small_one_is_valid_and_small() -> None:
    config = load_config(SMALL)
    found = validate_config(config, num_devices=1)
    assert found.errors == ()
    assert found.warnings == (f"data.data_dir {config.data.data_dir} does not exist; name the directory of a dataset",)
    plan = make_plan(config, device_memory_gib=1)
    assert plan.memory.peak < 0.95 * plan.usable_bytes


@pytest.mark.parametrize("example", [EXAMPLE, SMALL])
def test_its_commands_exist(example: Path) -> None:
    commands = re.findall(r"^#   (?:PYTHONPATH=\. )?acrlpd (\w+)", example.read_text(), re.MULTILINE)
    assert commands and set(commands) <= set(COMMANDS)


def test_the_file_for_openpis_aloha_sim_is_openpis_config() -> None:
    """docs/serving.md serves a released checkpoint with it."""
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    config = parse_config(text)
    assert validate_config(config).errors == ()
    assert config.model == Pi0Config(action_horizon=50, image_keys=("base_0_rgb",))
    assert config.data.repack.cameras == {"base_0_rgb": "observation.images.top"}
    assert (config.data.robot, config.data.use_delta_joint_actions) == (Aloha(adapt_to_pi=True), False)


def test_its_steps_lead_from_a_dataset_to_batches(dataset: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Label, stats, and a batch: the data section as it is, only the policy is smaller."""
    from acrlpd.data.pipeline.loader import create_data_loader

    monkeypatch.chdir(tmp_path)
    given = apply_config_overrides(load_config(EXAMPLE), {"data.data_dir": str(dataset)})
    [missing] = validate_config(given, num_devices=1, ready_to_train=True).errors
    assert "assets/aloha_hdf5_sim_raw/norm_stats.json" in missing and "acrlpd data stats --config" in missing
    assert main(["data", "label", str(dataset), "--success", "0", "--failure", "1"]) == 0
    assert main(["data", "stats", "--config", str(EXAMPLE), "--data-dir", str(dataset)]) == 0
    assert validate_config(given, num_devices=1, ready_to_train=True).errors == ()

    smaller = {
        "data.tokenizer": "byte",
        "data.num_workers": 0,
        "data.episodes_per_memory_pool": 0,
        "model.vocab_size": 512,
        "model.image_resolution": [28, 28],
    }
    small = apply_config_overrides(given, smaller | {"weight_loader.kind": "none"})
    assert validate_config(small, num_devices=1, ready_to_train=True).errors == ()
    with create_data_loader(small, 4) as loader:
        batch = loader.sample_batch()
        assert loader.dataset.rewards.success.mean() == 0.5
    assert batch.actions.shape == (4, 20, 32)
    assert np.isfinite(batch.actions).all() and np.abs(batch.actions[..., :14]).max() > 0
    assert set(batch.observations.images) == {"base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"}
    assert all(mask.all() for mask in batch.observations.image_masks.values())
