"""Parts of checkpoints: taken out of a run, and the start of another one."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from small_checkpoints import make_agent, openpi_checkpoint, save_run, state_config

from acrlpd.agents import Agent
from acrlpd.checksums import ChecksumError
from acrlpd.cli.main import main
from acrlpd.config import (
    ConfigError,
    LossWeights,
    MLPCritics,
    RLTrainConfig,
    WeightLoaderConfig,
    apply_config_overrides,
    cli,
)
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.runs.directory import run_directory, saved_steps, write_run_config
from acrlpd.training.experiment import run_experiment
from acrlpd.training.initial_weights import check_initial_weights, create_initial_agent
from acrlpd.training.options import RunOptions
from acrlpd.training.readiness import require_ready
from acrlpd.training.sharding import create_sharding


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = state_config()
    agents = {10: make_agent(config, seed=1), 20: make_agent(config, seed=2)}
    return save_run(tmp_path_factory.mktemp("runs") / "run", config, agents)


def started(**loader: Any) -> Agent:
    config = dataclasses.replace(state_config(), weight_loader=WeightLoaderConfig(**loader))
    check_initial_weights(config)
    return create_initial_agent(config, create_sharding(config), jax.random.key(0))


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_critics_alone_and_both_parts(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Critics of a run, of a checkpoint and of extracted parts; the policy that is not named starts as ever."""
    assert main(["runs", "extract", str(run / "10"), "--parts", "critics", "--output", str(tmp_path / "critics")]) == 0
    assert {path.name for path in (tmp_path / "critics").iterdir()} == {"critic", "parts.json", "checksums.json"}
    plain = started()
    for path, seed in ((tmp_path / "critics", 1), (run / "10", 1), (run, 2)):
        agent, source = started(critics=str(path)), make_agent(state_config(), seed=seed)
        assert_equal(agent.critics.online, source.critics.online)
        assert_equal(agent.critics.target, source.critics.online)
        assert_equal(agent.policy_params, plain.policy_params)
    parts = tmp_path / "both"
    assert main(["runs", "extract", str(run), "--parts", "policy,critics", "--output", str(parts)]) == 0
    config = cli(["--config", "debug", "--load", "critics,policy", str(parts)])
    assert config.weight_loader == WeightLoaderConfig("checkpoint", str(parts), critics=str(parts))
    agent, source = started(**dataclasses.asdict(config.weight_loader)), make_agent(state_config(), seed=2)
    assert_equal(agent.critics.online, source.critics.online)
    assert_equal(agent.policy_params, source.served_params())


def test_the_newest_policy_of_a_run(run: pathlib.Path) -> None:
    agent = started(kind="checkpoint", path=str(run))
    assert_equal(agent.policy_params, make_agent(state_config(), seed=2).served_params())


def test_what_cannot_be_loaded_or_extracted_is_named(
    run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"has no critics(.|\n)*openpi has a policy alone"):
        started(critics=str(openpi_checkpoint(tmp_path / "openpi")))
    with pytest.raises(CheckpointError, match="does not exist"):
        started(critics=str(tmp_path / "nowhere"))
    small = MLPCritics(num_critics=5, hidden_dims=(8,), use_pi0_features=False)
    config = state_config(critic=small, weight_loader=WeightLoaderConfig(critics=str(run)))
    does_not_fit = r"does not fit this config:\s+critics/online/bias: shape \(5, 16\)"
    with pytest.raises(CheckpointError, match=does_not_fit):
        create_initial_agent(config, create_sharding(config), jax.random.key(0))
    with pytest.raises(ConfigError, match=does_not_fit):
        require_ready([config], resume=False)  # before baselines train, which have no critics
    cloned = _cloned(state_config())
    other = save_run(tmp_path / "cloned", cloned, {10: make_agent(cloned)})
    with pytest.raises(CheckpointError, match="critics as they were initialised"):
        started(critics=str(other))
    output = tmp_path / "parts"
    for arguments, message in (
        ((run / "11", "--parts", "policy"), "has no complete checkpoint"),
        ((run, "--parts", "actor"), "the parts are policy, critics"),
        ((other, "--parts", "critics"), "critics as they were initialised"),
    ):
        assert main(["runs", "extract", *map(str, arguments), "--output", str(output)]) == 2
        assert message in capsys.readouterr().err and not output.exists()


def test_parts_that_were_changed_are_refused(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    parts = tmp_path / "parts"
    assert main(["runs", "extract", str(run), "--parts", "critics", "--output", str(parts)]) == 0
    assert main(["runs", "verify", str(parts)]) == 0
    assert main(["runs", "extract", str(run), "--parts", "critics", "--output", str(parts)]) == 2  # exists already
    data = max((parts / "critic").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with pytest.raises(ChecksumError, match="has changed since it was written"):
        started(critics=str(parts))
    assert main(["runs", "verify", str(parts)]) == 1


def _cloned(config: RLTrainConfig) -> RLTrainConfig:
    weights = LossWeights(critic_weight=0.0, actor_weight=0.0, bc_weight=1.0)
    return dataclasses.replace(config, acrlpd=dataclasses.replace(config.acrlpd, loss_weights=weights))


def test_what_a_run_starts_from_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    config = apply_config_overrides(state_config(), {"checkpoints.directory": str(tmp_path), "exp_name": "first"})
    directory = save_run(run_directory(config), config, {10: make_agent(config)})
    write_run_config(directory, config)
    (tmp_path / "link").symlink_to(directory)
    policy = WeightLoaderConfig("checkpoint", str(directory))
    critics = WeightLoaderConfig(critics=str(tmp_path / "link" / "10"))
    for loader, branch_from in ((policy, None), (critics, None), (WeightLoaderConfig(), str(tmp_path / "link"))):
        changed = dataclasses.replace(config, weight_loader=loader)
        with pytest.raises(ConfigError, match=r"--overwrite would remove .*choose another --exp_name"):
            run_experiment(changed, RunOptions(overwrite=True, branch_from=branch_from))
        assert saved_steps(directory) == [10]
