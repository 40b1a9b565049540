"""The seeds' functions for checkpoints. A checkpoint of a run holds openpi's `params/` and everything else."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.models import openpi_checkpoint
from acrlpd.policies.levels import Level
from acrlpd.runs.checkpoint_layout import PARAMS, CheckpointError, load_described_config, newest_step_directory
from acrlpd.seeds.agent import ACRLPDPi0Agent, as_seed_agent
from acrlpd.serving.export import export_policy
from acrlpd.training.checkpoints import metadata
from acrlpd.training.checkpoints.reader import load_checkpoint_agent
from acrlpd.training.checkpoints.writer import write_checkpoint

logger = logging.getLogger(__name__)


def save_acrlpd_checkpoint(
    agent: ACRLPDPi0Agent,
    step: int,
    checkpoint_dir: str | pathlib.Path,
    save_openpi: bool = True,
    save_full: bool = True,
) -> dict[str, str]:
    """Writes an agent, and returns where: the whole agent in `checkpoint_dir`/acrlpd_full_step_<step>/<step>.

    openpi's `params` lie in there. Without `save_full`, `checkpoint_dir`/pi0_openpi_step_<step> holds the policy alone.
    A run of `acrlpd train` is not resumed from such a checkpoint, which knows no batches; an agent is loaded, served,
    evaluated and exported from it.
    """
    directory = pathlib.Path(checkpoint_dir).expanduser().absolute()
    if not save_full:
        if not save_openpi:
            raise ConfigError("nothing to save: save_openpi and save_full are both off")
        return {"openpi_checkpoint": save_openpi_pi0_checkpoint(agent, directory / f"pi0_openpi_step_{step}")}
    directory /= f"acrlpd_full_step_{step}"  # A directory of its own: a run would remove its older checkpoints.
    rng, assets = jax.random.key(agent.config.seed), metadata.read_assets(agent.config)
    if not write_checkpoint(directory, agent.config, agent, step, rng=rng, state={}, assets=assets):
        raise CheckpointError(f"{directory / str(step)} could not be written; the log says why")
    paths = {"full_checkpoint": str(directory)}
    return paths | ({"openpi_checkpoint": str(directory / str(step) / PARAMS)} if save_openpi else {})


def save_unified_checkpoints(agent: ACRLPDPi0Agent, step: int, checkpoint_dir: str | pathlib.Path) -> dict[str, str]:
    """The whole agent, with the policy as openpi reads it."""
    return save_acrlpd_checkpoint(agent, step, checkpoint_dir)


def save_openpi_pi0_checkpoint(agent: ACRLPDPi0Agent, checkpoint_path: str | pathlib.Path) -> str:
    """Writes the policy that is served as `checkpoint_path`/params, which openpi loads."""
    openpi_checkpoint.save_openpi_pi0_checkpoint(agent.served_params(), checkpoint_path)
    return str(pathlib.Path(checkpoint_path) / PARAMS)


def load_acrlpd_checkpoint(
    checkpoint_path: str | pathlib.Path, rl_config: RLTrainConfig | None = None, rng: jax.Array | None = None
) -> tuple[ACRLPDPi0Agent, int]:
    """The agent and the step of a checkpoint, or of the newest one of a run. Nothing is drawn from `rng`."""
    agent, step = load_checkpoint_agent(checkpoint_path, rl_config)
    return as_seed_agent(agent, rl_config or load_described_config(newest_step_directory(checkpoint_path))), step


def load_pi0_weights_from_openpi(
    openpi_checkpoint_path: str | pathlib.Path, target_agent: ACRLPDPi0Agent
) -> ACRLPDPi0Agent:
    """The agent with the policy of an openpi checkpoint; its moving average begins with the same weights."""
    wanted = nnx.merge_state(target_agent.policy_params, target_agent.frozen_params)
    loaded = openpi_checkpoint.load_pi0_weights_from_openpi(openpi_checkpoint_path, wanted)
    return target_agent.with_policy_params(loaded)


def create_checkpoint_metadata(
    rl_config: RLTrainConfig, training_metrics: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """What a checkpoint says about its run, and the metrics."""
    average = rl_config.acts_with_average
    described = metadata.create_checkpoint_metadata(
        rl_config, step, average=average, assets=metadata.read_assets(rl_config)
    )
    return described | {"training_metrics": dict(training_metrics)}


def validate_checkpoint_compatibility(checkpoint_path: str | pathlib.Path, expected_config: RLTrainConfig) -> bool:
    """Whether a run with this config may go on from the checkpoint; if not, the log says why."""
    directory = newest_step_directory(checkpoint_path)
    try:
        metadata.check_resume(directory, expected_config, metadata.read_assets(expected_config))
    except (ConfigError, CheckpointError) as error:
        logger.warning("%s", error)
        return False
    return True


def verify_openpi_checkpoint_compatibility(
    checkpoint_path: str | pathlib.Path, rl_config: RLTrainConfig | None = None
) -> bool:
    """Whether openpi finds exactly the parameters of the policy; if not, the log says what differs.

    The config is that of the checkpoint; a directory with `params` alone needs one.
    """
    config = rl_config or load_described_config(newest_step_directory(checkpoint_path))
    problems = openpi_checkpoint.verify_openpi_checkpoint_compatibility(checkpoint_path, config.model)
    for problem in problems:
        logger.warning("%s", problem)
    return not problems


def export_acrlpd_model(
    checkpoint_path: str | pathlib.Path, output_dir: str | pathlib.Path, optimization_level: Level = "standard"
) -> str:
    """Exports a checkpoint for openpi and for serving; the result acts like the checkpoint, or nothing is written."""
    export_policy(checkpoint_path, output_dir, level=optimization_level)
    return str(output_dir)
