"""The weights that a run starts from."""

import dataclasses
import pathlib
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_checkpoints import make_agent, save_run, state_config
from training_helpers import pi0_config

from acrlpd.checksums import ChecksumError
from acrlpd.config import ConfigError, RLTrainConfig, WeightLoaderConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.openpi_checkpoint import OpenPICheckpointError
from acrlpd.training.experiment import run_experiment
from acrlpd.training.initial_weights import check_initial_weights, create_initial_agent
from acrlpd.training.options import RunOptions
from acrlpd.training.sharding import create_sharding

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
TINY = Pi0Config(
    paligemma_variant="dummy",
    action_expert_variant="dummy",
    siglip_variant="mu/14",
    vocab_size=512,
    action_horizon=10,
    max_token_len=16,
)


@pytest.fixture(scope="module")
def openpi_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("openpi")
    with tarfile.open(GOLDENS / "ckpt_openpi_tiny_pi0_ema.tar.gz") as archive:
        archive.extractall(root, filter="data")
    return root / "openpi_tiny_pi0_ema" / "100"


def config_with(
    model: Pi0Config, path: pathlib.Path | None, kind: str = "checkpoint", **changes: object
) -> RLTrainConfig:
    loader = WeightLoaderConfig(kind=kind, path=None if path is None else str(path))  # type: ignore[arg-type]
    return dataclasses.replace(pi0_config(pathlib.Path("unused")), model=model, weight_loader=loader, **changes)


def named(state: nnx.State) -> dict[str, jax.Array]:
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def test_an_openpi_checkpoint(openpi_checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen backbone and adapters at once: both kinds of leaves, and some that the file lacks."""
    model = dataclasses.replace(TINY, action_expert_variant="dummy_lora")
    monkeypatch.setenv("HOME", str(openpi_checkpoint.parent))  # as in a YAML file, where no shell replaces ~
    config = config_with(model, pathlib.Path("~") / openpi_checkpoint.name, freeze_pi0_backbone=True)
    agent = create_initial_agent(config, create_sharding(config), jax.random.key(0))
    stored = np.load(GOLDENS / "params_pi0.npz")
    trainable, frozen, average = (named(x) for x in (agent.policy_params, agent.frozen_params, agent.ema_params))
    adapters = [name for name in trainable if "lora" in name]
    assert adapters and frozen
    assert {*trainable, *frozen} == {*stored, *adapters}
    for name, value in trainable.items():
        assert value.dtype == jnp.float32
        assert (np.asarray(value) == np.asarray(average[name])).all()
        if name in stored:
            np.testing.assert_array_equal(value, stored[name])
        else:
            assert np.asarray(value).std() > 0
    for name, value in frozen.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, stored[name].astype(jnp.bfloat16))


def test_a_path_is_needed() -> None:
    config = config_with(TINY, None)
    with pytest.raises(ConfigError, match=r"weight_loader.kind=checkpoint needs weight_loader.path"):
        create_initial_agent(config, create_sharding(config), jax.random.key(0))


@pytest.mark.parametrize("description", ["run/run.json", "acrlpd.json"], ids=["run", "export"])
@pytest.mark.parametrize("inner", ["", "params"])
def test_a_checkpoint_of_acrlpd_needs_its_checksums(description: str, inner: str, tmp_path: pathlib.Path) -> None:
    config = state_config()
    step = save_run(tmp_path / "run", config, {10: make_agent(config)}) / "10"
    (step / "run" / "run.json").rename(step / description)
    loader = WeightLoaderConfig(kind="checkpoint", path=str(step / inner))
    config = dataclasses.replace(config, weight_loader=loader)
    create_initial_agent(config, create_sharding(config), jax.random.key(0))
    (step / "params" / "checksums.json").unlink()
    with pytest.raises(ChecksumError, match=r"10/params/checksums\.json is missing"):
        check_initial_weights(config)
    with pytest.raises(ChecksumError, match=r"10/params/checksums\.json is missing"):
        create_initial_agent(config, create_sharding(config), jax.random.key(0))
    (step / description).unlink()  # what is left is a checkpoint of openpi
    check_initial_weights(config)


@pytest.mark.parametrize("kind", ["checkpoint", "paligemma"])
def test_missing_weights_are_noticed_before_the_data_is_opened(kind: str, tmp_path: pathlib.Path) -> None:
    config = pi0_config(
        tmp_path,
        data__data_dir=str(tmp_path / "no_dataset"),  # to open it would be another error
        weight_loader__kind=kind,
        weight_loader__path=str(tmp_path / "pi0_bose"),
    )
    with pytest.raises(OpenPICheckpointError, match="pi0_bose does not exist"):
        run_experiment(config, RunOptions())
