"""A run starts from weights on a hub: a mirror of openpi's checkpoints, or a file of openpi's PyTorch models."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from small_checkpoints import make_agent, openpi_checkpoint, openpi_config, state_config

from acrlpd.config import WeightLoaderConfig
from acrlpd.hub import HubError
from acrlpd.models.openpi_checkpoint import flatten_params, load_pi0_weights_from_openpi
from acrlpd.models.openpi_pytorch import load_pytorch_weights, save_pytorch_weights
from acrlpd.training.initial_weights import check_initial_weights, create_initial_agent, locate_weights
from acrlpd.training.sharding import create_sharding
from local_hub import LocalHub, Repository


def local_weights(address: str) -> str:
    found = locate_weights(WeightLoaderConfig("checkpoint", address)).policy
    assert found is not None
    return found


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


class BusyRepository(Repository):
    """Somebody pushes whenever somebody asks for the newest state."""

    def resolve(self, revision: str) -> str | None:
        commit = super().resolve(revision)
        if revision == "main":
            self.commit(self.files(self.head))
        return commit


def test_policy_and_critics_are_of_one_state_of_a_repository(trained: Path, hub: LocalHub) -> None:
    hub.repositories["models", "lab/busy"] = BusyRepository()
    hub.add("models", "lab/busy", trained / "50")
    loader = WeightLoaderConfig("checkpoint", "hf://lab/busy", critics="hf://lab/busy")
    config = dataclasses.replace(state_config(), weight_loader=loader)
    weights = check_initial_weights(config)
    assert weights.policy is not None and weights.critics == Path(weights.policy) / "critic"
    before = len(hub.repositories["models", "lab/busy"].states)
    agent = create_initial_agent(config, create_sharding(config), jax.random.key(0), weights)
    assert len(hub.repositories["models", "lab/busy"].states) == before  # the hub was not asked again
    pushed = make_agent(state_config())
    for found, expected in ((agent.critics.online, pushed.critics.online), (agent.policy_params, pushed.ema_params)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_repository_without_weights(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"")
    hub.add("models", "mirror/other", tmp_path / "other")
    with pytest.raises(HubError, match=r"expected params/_METADATA, _METADATA or model\.safetensors"):
        local_weights("hf://mirror/other")
