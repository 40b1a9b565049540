"""What `import acrlpd` offers: about a dozen functions from a config to a policy that acts.

Each function is a door to the code that the commands use. Everything random follows from the seed of the config; the
noise of a chunk follows from the seed that `act` is given. `acrlpd.<name>` imports this module when a name is first
used, because JAX takes a second to import.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.agents import Agent
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.config import list_configs as list_configs
from acrlpd.config.command_line import find_config
from acrlpd.config.create_agent import run_keys
from acrlpd.config.plan.accelerators import claim_device_memory
from acrlpd.data.pipeline import dataset as datasets
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.evaluation.protocol import Evaluation, EvaluationProtocol
from acrlpd.hub import is_hub_address
from acrlpd.policies import checkpoint as checkpoints
from acrlpd.policies import policy as policies
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.policy import Policy
from acrlpd.process import setup_logging, setup_process
from acrlpd.runs.directory import run_directory
from acrlpd.serving.export import export_policy as export_policy
from acrlpd.text import print
from acrlpd.training.checkpoints.reader import load_checkpoint_agent
from acrlpd.training.demonstrations import collect_missing_demonstrations
from acrlpd.training.experiment import run_experiment
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.options import RunOptions
from acrlpd.training.readiness import require_ready, skip_online_phase
from acrlpd.training.sharding import create_sharding
from acrlpd.training.updates import save_agent as save_agent
from acrlpd.training.updates import update_agent as update_agent

PathLike = str | os.PathLike[str]


def get_config(name: PathLike, overrides: Mapping[str, Any] | None = None) -> RLTrainConfig:
    """A preset by name, or the config in a YAML file, such as the `config.yaml` of a run.

    `overrides` changes fields by dotted name, for example `{"critic.num_critics": 4, "batch_size": 32}`. Mistakes are
    reported together, in one `ConfigError`.
    """
    return apply_config_overrides(find_config(os.fspath(name)), overrides)


def open_dataset(config: RLTrainConfig) -> Dataset:
    """Opens the dataset of a config, and checks that its parts fit together.

    Demonstrations and norm statistics that the config describes and that do not exist yet are made first, as
    `acrlpd train` does. `Dataset.close` closes the files.
    """
    collect_missing_demonstrations(config)
    return datasets.open_dataset(config)


def create_agent(config: RLTrainConfig) -> Agent:
    """The agent of a config at step 0, with the initial weights that `weight_loader` names."""
    claim_device_memory()
    setup_process()
    return create_initial_agent(config, create_sharding(config), run_keys(config).initial)


def load_agent(checkpoint: PathLike) -> Agent:
    """The agent of a run (its newest checkpoint) or of one checkpoint, with everything that an update needs.

    The checkpoint is a directory: repositories of the hub seldom have the state of the optimizers.
    """
    if is_hub_address(os.fspath(checkpoint)):
        raise ConfigError(
            f"load_agent needs a directory, because an agent has optimizers; found {checkpoint}. load_policy takes the "
            "address, and weight_loader.path and weight_loader.critics of a config start a new agent from it"
        )
    claim_device_memory()
    setup_process()
    agent, _ = load_checkpoint_agent(pathlib.Path(checkpoint))
    return agent


def create_policy(config: RLTrainConfig, agent: Agent, dataset: Dataset, *, best_of_n: int | None = None) -> Policy:
    """The policy of an agent, which acts as in the evaluations of a run.

    `best_of_n` is the number of candidates among which the critics choose; None: as the config says. The policy has
    arrays of its own, so the agent may go on learning.
    """
    model = jax.tree.map(jnp.copy, acting_model(agent, average=config.acts_with_average))
    policy = policies.create_policy(model, config, dataset.norm_stats, best_of_n=best_of_n)
    return dataclasses.replace(policy, reward_origin=dataset.rewards.origin)


def load_policy(checkpoint: PathLike, config: RLTrainConfig | None = None, *, best_of_n: int | None = None) -> Policy:
    """The policy of a run, a checkpoint, an export, or a checkpoint of openpi.

    A checkpoint of openpi does not say for which model and robot it is, so it needs a `config`; the others have one.
    """
    setup_logging()
    opened = checkpoints.open_checkpoints([pathlib.Path(checkpoint)], config)
    return checkpoints.load_policy(opened[0], best_of_n=best_of_n)


def act(policy: Policy, observation: Mapping[str, np.ndarray], *, prompt: str = "", seed: int = 0) -> np.ndarray:
    """The action chunk for one observation: float32 [steps, action dims], in the units of the robot.

    The observation has the columns of the policy's dataset, such as `observation.state`. An empty `prompt` is that of
    the config. Equal seeds give equal chunks.
    """
    columns = {name: np.asarray(value)[None] for name, value in observation.items()}
    return policy(columns, [prompt], [seed]).actions[0]


def evaluate(
    policy: Policy,
    overrides: Mapping[str, Any] | None = None,
    *,
    num_workers: int | None = None,
    directory: PathLike | None = None,
) -> Evaluation:
    """Plays the episodes of `config.evaluation` in the environment of the policy's config.

    `overrides` changes fields of the config by dotted name, for example `{"evaluation.num_episodes": 200}`.
    `num_workers` is the number of processes of the environments: 0 is this process, None is one per core.
    `evaluation.json` and videos go to `directory`.
    """
    config = apply_config_overrides(policy.rl_config, overrides)
    with EvaluationProtocol(
        config, policy.norm_stats, reward_origin=policy.reward_origin, num_workers=num_workers
    ) as protocol:
        return protocol.evaluate(policy, directory=None if directory is None else pathlib.Path(directory))


def train(config: RLTrainConfig, *, resume: bool = False, overwrite: bool = False) -> pathlib.Path:
    """Trains a run to its end, as `acrlpd train` does, and returns its directory.

    The directory holds checkpoints, metrics and the report. Ctrl-C saves and raises KeyboardInterrupt; `resume` goes on
    from there. `overwrite` replaces an earlier run of the same name.
    """
    claim_device_memory()
    config, skipped = skip_online_phase(config)
    collect_missing_demonstrations(config)
    for warning in (*filter(None, [skipped]), *require_ready([config], resume=resume)):
        print(f"warning: {warning}")
    if code := run_experiment(config, RunOptions(resume=resume, overwrite=overwrite)):
        raise KeyboardInterrupt(f"the run was stopped and saved (exit code {code}); resume=True continues it")
    return run_directory(config)


def serve(checkpoint: PathLike, **options: Any) -> None:
    """Serves a run, a checkpoint or an export on openpi's protocol, until SIGTERM or Ctrl-C.

    `options` are the options of `acrlpd serve`, for example `port=8000` or `best_of_n=16`.
    """
    from acrlpd.cli.serve import ServeOptions
    from acrlpd.cli.serve import serve as serve_checkpoint

    serve_checkpoint(ServeOptions(pathlib.Path(checkpoint), **options))
