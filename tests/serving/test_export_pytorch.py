"""Exports for PyTorch act as the training policy does, and say how openpi and lerobot load them."""

import ast
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from small_checkpoints import make_agent, pi0_config, save_run, state_config

from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.checksums import ChecksumError
from acrlpd.cli.export import main as export_main
from acrlpd.cli.runs import verify
from acrlpd.config import DataConfig, WeightLoaderConfig, get_config
from acrlpd.models.openpi_pytorch import load_pytorch_weights
from acrlpd.policies.acting_model import abstract_model
from acrlpd.policies.checkpoint import Checkpoint, open_checkpoint
from acrlpd.robots.base import ServingLevel
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.serving.export_pytorch import export_for_pytorch
from acrlpd.serving.export_readme import write_pytorch_readme
from acrlpd.training.initial_weights import check_initial_weights

LORA_MODEL = dataclasses.replace(
    pi0_config().model, paligemma_variant="dummy_lora", action_expert_variant="dummy_lora", image_keys=()
)
LORA_CONFIG = pi0_config(model=LORA_MODEL, data=DataConfig(repo_id="fake", asset_id="lab/arm", tokenizer="byte"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "lora", LORA_CONFIG, {5: make_agent(LORA_CONFIG)})


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "out"
    assert export_main([str(run), "--output", str(out), "--format", "pytorch"]) == 0
    return out


def test_the_directory_has_openpis_layout_and_merged_weights(run: Path, exported: Path) -> None:
    names = {"model.safetensors", "config.json", "assets", "acrlpd.json", "checksums.json", "README.md"}
    assert {path.name for path in exported.iterdir()} == names
    assert len({path.stat().st_mode for path in exported.iterdir() if path.is_file()}) == 1  # a server reads all
    arrays = load_file(exported / "model.safetensors")
    assert not [name for name in arrays if "lora" in name]
    model = open_checkpoint(run).load_model()
    plain, merged = LORA_CONFIG.model.merge_adapters(model.params)
    target = abstract_model(dataclasses.replace(LORA_CONFIG, model=plain)).params
    loaded = load_pytorch_weights(exported / "model.safetensors", target)
    for (path, leaf), (_, expected) in zip(*map(nnx.to_flat_state, (loaded, merged)), strict=True):
        np.testing.assert_array_equal(leaf.get_value(), expected.get_value(), err_msg="/".join(map(str, path)))
    assert json.loads((exported / "config.json").read_text()) == {
        "action_dim": LORA_MODEL.action_dim,
        "action_horizon": LORA_MODEL.action_horizon,
        "paligemma_variant": "dummy",
        "action_expert_variant": "dummy",
        "precision": "float32",
    }
    stats = [path / "assets" / "lab" / "arm" / "norm_stats.json" for path in (exported, run / "5")]
    assert stats[0].read_bytes() == stats[1].read_bytes()


def test_a_rounded_export_stays_close_and_replaces_another(run: Path, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    with pytest.raises(CheckpointError, match="--overwrite"):
        export_for_pytorch(run, tmp_path / "out")
    rounded = export_for_pytorch(run, tmp_path / "out", dtype="bfloat16", overwrite=True)
    assert rounded and 0 < rounded.mean_difference < 2e-2
    assert {x.dtype.name for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {"bfloat16"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_openpi_and_lerobot_serve_it(exported: Path) -> None:
    with pytest.raises(CheckpointError, match=r"PyTorch layout.*without --format pytorch"):
        open_checkpoint(exported)


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="leave --critics out"):
        export_main([str(run), "--output", str(tmp_path / "out"), "--format", "pytorch", "--critics", "all"])
    states = state_config()
    other = save_run(tmp_path / "state", states, {1: make_agent(states)})
    with pytest.raises(CheckpointError, match="trained a state_flow policy"):
        export_for_pytorch(other, tmp_path / "out")
    steered = dataclasses.replace(LORA_CONFIG, improvement=Distillation(hidden_dims=(8,)))
    other = save_run(tmp_path / "steered", steered, {1: make_agent(steered)})
    with pytest.raises(CheckpointError, match=r"distillation makes the actions.*without --format pytorch"):
        export_for_pytorch(other, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ValueError, match=r"needs the package safetensors: pip install .*\[pytorch\]"):
        export_for_pytorch(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_starts_from_an_export_that_is_intact(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(exported) == 0
    assert "model.safetensors" in capsys.readouterr().out
    config = dataclasses.replace(LORA_CONFIG, weight_loader=WeightLoaderConfig("checkpoint", str(exported)))
    check_initial_weights(config)
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert verify(copy) == 1
    changed = dataclasses.replace(config, weight_loader=WeightLoaderConfig("checkpoint", str(copy)))
    with pytest.raises(ChecksumError, match=r"model\.safetensors has changed"):
        check_initial_weights(changed)


@pytest.mark.parametrize(("preset", "family"), [("aloha", "pi0"), ("libero_pi05", "pi05")])
def test_the_readme_has_what_openpi_and_lerobot_need(preset: str, family: str, tmp_path: Path) -> None:
    config = get_config(preset)
    assets = tmp_path / "assets" / "lab"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path, "export", config, ServingLevel(10, 1, 0), 7, has_critics=False)
    write_pytorch_readme(tmp_path, checkpoint, merged_adapters=False)
    readme = (tmp_path / "README.md").read_text()
    entry, lerobot = (part.split("```")[0] for part in readme.split("```python")[1:])
    assert f"--policy.config=acrlpd_{preset} " in readme and f"name='acrlpd_{preset}'" in entry
    tree = ast.parse(lerobot)
    imports = {f"{node.module}.{node.names[0].name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert f"lerobot.policies.{family}.modeling_{family}.{family.upper()}Policy" in imports
    [call] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == f"{family.upper()}Config"
    ]
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    assert ast.literal_eval(values["chunk_size"]) == config.model.action_horizon
    assert ast.literal_eval(values["tokenizer_max_length"]) == (200 if family == "pi05" else 48)
    assert "assets/lab/norm_stats.json" in lerobot and "All keys loaded successfully" in readme
    assert ("actions relative to the state" in readme) == (preset == "aloha")
    assert "room for 32 actions" not in readme
