"""A run starts from weights on a hub: a mirror of openpi's checkpoints, or a file of openpi's PyTorch models."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from small_checkpoints import openpi_checkpoint, openpi_config

from acrlpd.config import WeightLoaderConfig
from acrlpd.hub import HubError
from acrlpd.models.openpi_checkpoint import flatten_params, load_pi0_weights_from_openpi
from acrlpd.models.openpi_pytorch import load_pytorch_weights, save_pytorch_weights
from acrlpd.training.initial_weights import check_initial_weights, local_weights
from local_hub import LocalHub


def test_weights_of_a_mirror(hub: LocalHub, tmp_path: Path) -> None:
    openpi_checkpoint(tmp_path / "mirror")
    [params] = [path for path in (tmp_path / "mirror").rglob("params") if path.parent.name == "100"]
    hub.add("models", "mirror/openpi", tmp_path / "mirror")
    within = params.relative_to(tmp_path / "mirror").as_posix()
    config = openpi_config()
    shapes = nnx.state(nnx.eval_shape(lambda: config.model.create(jax.random.key(0))), nnx.Param)
    expected = load_pi0_weights_from_openpi(params, shapes)
    save_pytorch_weights(expected, tmp_path / "mirror" / "model.safetensors")
    hub.add("models", "mirror/pytorch", tmp_path / "mirror")
    loaded = {}
    for address in (f"hf://mirror/openpi/{within}", f"hf://mirror/openpi@main/{within.removesuffix('/params')}"):
        loaded[address] = load_pi0_weights_from_openpi(local_weights(address), shapes)
    assert not [name for name in hub.downloaded if "train_state" in name]
    for address in ("hf://mirror/pytorch", "hf://mirror/pytorch/model.safetensors"):
        file = Path(local_weights(address))
        loaded[address] = load_pytorch_weights(file / "model.safetensors" if file.is_dir() else file, shapes)
        loader = WeightLoaderConfig("checkpoint", address)
        check_initial_weights(dataclasses.replace(config, weight_loader=loader))
    for found in loaded.values():
        for name, value in flatten_params(expected).items():
            np.testing.assert_array_equal(flatten_params(found)[name], value)


def test_a_repository_without_weights(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"")
    hub.add("models", "mirror/other", tmp_path / "other")
    with pytest.raises(HubError, match=r"expected params/_METADATA, _METADATA or model\.safetensors"):
        local_weights("hf://mirror/other")
