"""The seeds' trainer: an agent and a loader that exist already, in one run directory."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from acrlpd.agents.improvements.base import Info
from acrlpd.batch import Batch
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, get_config
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.runs.directory import run_directories, run_directory, saved_steps, write_run_config, write_summary
from acrlpd.seeds import memory
from acrlpd.seeds.agent import ACRLPDPi0Agent, as_seed_agent, create_acrlpd_pi0_agent_from_rl_config
from acrlpd.seeds.checkpoints import load_acrlpd_checkpoint, save_acrlpd_checkpoint, save_openpi_pi0_checkpoint
from acrlpd.seeds.configs import ACRLPDTrainingConfig
from acrlpd.seeds.data import ACRLPDDataLoader
from acrlpd.seeds.fsdp import TrainStep, create_fsdp_train_step_fn
from acrlpd.training.checkpoints.metadata import check_resume, read_assets
from acrlpd.training.drive import Arena, EvalFn, drive, train
from acrlpd.training.learner import Learner
from acrlpd.training.sharding import FSDPSharding, create_sharding
from acrlpd.training.train_runs import end_status
from acrlpd.training.trainer import Trainer

logger = logging.getLogger(__name__)


class ACRLPDTrainer:
    """Trains an agent on the batches of a loader: the offline phase of `acrlpd train`, without held-out episodes.

    The trainer takes the agent over and uses its arrays up; `agent` is the agent as it is now. An online phase needs
    the environments and the replay that `acrlpd train` makes, so it is skipped here with a warning.
    """

    def __init__(
        self,
        agent: ACRLPDPi0Agent,
        dataloader: DataLoader,
        rl_config: RLTrainConfig | ACRLPDTrainingConfig,
        training_config: ACRLPDTrainingConfig | EvalFn | None = None,
        eval_fn: EvalFn | None = None,
        mesh: Mesh | None = None,
        data_sharding: Sharding | None = None,
        replicated_sharding: Sharding | None = None,
        global_pi0_tx: Any = None,
        global_critic_tx: Any = None,
    ) -> None:
        """`eval_fn` gets the agent and the step, and returns metrics by name.

        The fourth argument may be the `eval_fn`, as in 004. The optimizers are the agent's own, and the shardings
        follow from the mesh; both arguments may be left out.
        """
        if training_config is not None and not isinstance(training_config, ACRLPDTrainingConfig):
            training_config, eval_fn = None, training_config
        settings = rl_config if isinstance(rl_config, ACRLPDTrainingConfig) else training_config
        config = agent.config if isinstance(rl_config, ACRLPDTrainingConfig) else rl_config
        self.settings = settings or ACRLPDTrainingConfig()
        config = self.settings.apply(config)
        if config.training.online_steps:
            logger.warning("%d online updates are skipped: `acrlpd train` plays", config.training.online_steps)
        self.rl_config = apply_config_overrides(config, online_steps=0)
        self.directory = run_directory(self.rl_config)
        self._agent = agent
        self._loader = dataloader
        self._eval_fn = eval_fn
        self._sharding = create_sharding(self.rl_config)
        self._trainer: Trainer | None = None
        self._open = contextlib.ExitStack()
        if mesh is not None:
            self.setup_fsdp(mesh, data_sharding)

    @property
    def agent(self) -> ACRLPDPi0Agent:
        """The agent after the updates so far."""
        if self._trainer is None:
            return self._agent
        return as_seed_agent(self._trainer.agent, self.rl_config)

    def setup_fsdp(self, mesh: Mesh, data_sharding: Sharding | None = None) -> None:
        """Chooses the devices and how many of them share a copy; call this before the first update."""
        if self._trainer is not None:
            raise ConfigError("setup_fsdp comes before initialize: the arrays of a run do not move while it trains")
        self._sharding = FSDPSharding(mesh, self.rl_config.fsdp.min_size_mib)
        if data_sharding is not None and data_sharding.device_set != self._sharding.data.device_set:
            raise ConfigError("data_sharding names other devices than the mesh")

    def setup_fsdp_state(self, train_state: ACRLPDPi0Agent, state_sharding: Any, fsdp_train_step_fn: Any) -> None:
        """Takes an agent that lies in its places. The run compiles its own step."""
        self._agent = train_state

    def initialize(self) -> None:
        """Makes the directory of the run, and puts the agent in its place or loads the run that is resumed.

        `train` and `train_epoch` call this.
        """
        if self._trainer is not None:
            return
        resume, assets = self.settings.resume, read_assets(self.rl_config)
        self._open.enter_context(run_directories([self.directory], resume=resume, overwrite=self.settings.overwrite))
        steps = saved_steps(self.directory) if resume else []
        if steps:
            check_resume(self.directory / str(steps[-1]), self.rl_config, assets)
        write_run_config(self.directory, self.rl_config)
        is_evaluated = self._eval_fn is not None
        learner = Learner(self._sharding)
        self._trainer = Trainer(
            self.rl_config, self._loader, learner, self.directory, assets=assets, is_evaluated=is_evaluated
        )
        self._open.callback(self._trainer.close)
        if steps:
            self._trainer.load_checkpoint(self.directory / str(steps[-1]))
        else:
            places = jax.tree.map(self._sharding.of_array, self._agent)
            self._trainer.initialize(jax.device_put(self._agent, places))

    def train(self) -> ACRLPDPi0Agent:
        """All updates of the config, with metrics, evaluations and checkpoints; returns the trained agent."""
        self.initialize()
        assert self._trainer is not None
        with self._open:
            train([self._trainer], [Arena((0,), eval_fn=self._eval_fn)])
            write_summary(self.directory, {"status": end_status(self._trainer)} | self._trainer.summary())
        self._agent, self._trainer = self.agent, None
        return self._agent

    def train_epoch(self, epoch: int, num_steps: int) -> dict[str, float]:
        """`num_steps` more updates; returns the last line of metrics. `epoch` is for the log alone."""
        self.initialize()
        assert self._trainer is not None
        last_step = self._trainer.step + num_steps
        drive([self._trainer], [self._trainer.train_until(last_step)], [Arena((0,), eval_fn=self._eval_fn)])
        self._trainer.save_checkpoint()
        logger.info("epoch %d ends after step %d", epoch, last_step)
        return {name: value for name, value in self._trainer.metrics_log.last.items() if isinstance(value, float)}

    def close(self) -> None:
        """Ends the threads of a run that `train` did not end, and frees its directory."""
        if self._trainer is not None:
            self._agent, self._trainer = self.agent, None
        self._open.close()

    def train_step_wrapper(self, agent: ACRLPDPi0Agent, batch: Batch, rng: jax.Array) -> tuple[ACRLPDPi0Agent, Info]:
        """One compiled update of any agent; nothing is recorded."""
        return agent.train_step(batch, rng)

    def create_fsdp_train_step(self) -> TrainStep:
        """One update as the run makes it, in the places of the run."""
        return create_fsdp_train_step_fn(self.agent, self._sharding.mesh)

    def save_checkpoint(self, step: int, agent: ACRLPDPi0Agent, checkpoint_dir: str | pathlib.Path) -> None:
        """Writes an agent; `train` writes the run's own checkpoints."""
        save_acrlpd_checkpoint(agent, step, checkpoint_dir)

    def save_openpi_checkpoint(self, step: int, agent: ACRLPDPi0Agent, checkpoint_dir: str | pathlib.Path) -> None:
        """Writes the policy alone, for openpi."""
        save_acrlpd_checkpoint(agent, step, checkpoint_dir, save_full=False)

    def load_checkpoint(self, checkpoint_path: str | pathlib.Path) -> ACRLPDPi0Agent:
        """The agent of a checkpoint, from which this trainer begins if it has not begun yet."""
        agent, _ = load_acrlpd_checkpoint(checkpoint_path)
        if self._trainer is None:
            self._agent = agent
        return agent

    def evaluate(self, agent: ACRLPDPi0Agent, eval_steps: int = 100) -> Mapping[str, float]:
        """Judges an agent by `eval_fn`, or in `eval_steps` episodes of the config's environment."""
        if self._eval_fn is not None:
            return self._eval_fn(agent, int(agent.step))
        if self.rl_config.env.id is None:
            raise ConfigError("there is nothing to judge the agent by: give eval_fn, or set env.id")
        config = apply_config_overrides(self.rl_config, {"evaluation.num_episodes": eval_steps})
        dataset = self._loader.dataset
        with EvaluationProtocol(config, dataset.norm_stats, reward_origin=dataset.rewards.origin) as protocol:
            return protocol.evaluate(protocol.policy(agent)).metrics()

    def log_training_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs metrics of the caller; a run writes its own to metrics.jsonl."""
        shown = ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
        logger.info("metrics at step %d: %s", step, shown)

    def log_memory_usage(self, step: int, phase: str = "training") -> None:
        """Logs what the devices hold; a run writes this with every line of metrics."""
        memory.log_memory_usage(step, phase=phase)


class ACRLPDTrainingLoop:
    """Updates of one agent, without a run around them."""

    def __init__(
        self, agent: ACRLPDPi0Agent, data_loader: DataLoader, enable_fsdp: bool = False, enable_wandb: bool = False
    ) -> None:
        """FSDP is where the arrays of the agent lie, and Weights & Biases belongs to a run: neither changes a step."""
        self.agent = agent
        self.data_loader = data_loader

    def train_step(self, batch: Batch, rng: jax.Array) -> tuple[float, Info]:
        """One update; returns the total loss and every metric."""
        self.agent, info = self.agent.train_step(batch, rng)
        return float(info["total_loss"]), info

    def save_acrlpd_checkpoint(self, checkpoint_path: str | pathlib.Path) -> None:
        """Writes the whole agent."""
        save_acrlpd_checkpoint(self.agent, int(self.agent.step), checkpoint_path)

    def create_openpi_checkpoint(self, checkpoint_path: str | pathlib.Path) -> None:
        """Writes the policy alone, for openpi."""
        save_openpi_pi0_checkpoint(self.agent, checkpoint_path)


def setup_jax_environment(rl_config: RLTrainConfig, args: Any = None) -> tuple[Mesh, NamedSharding, NamedSharding]:
    """The mesh of a config, and the places of batches and of replicated arrays."""
    sharding = create_sharding(rl_config)
    return sharding.mesh, sharding.data, sharding.replicated


def create_training_components(
    rl_config: RLTrainConfig, mesh: Mesh, data_sharding: NamedSharding, rng: jax.Array
) -> tuple[ACRLPDPi0Agent, ACRLPDDataLoader, ACRLPDTrainer]:
    """Agent, loader and trainer of a config."""
    agent = create_acrlpd_pi0_agent_from_rl_config(rl_config, rng)
    loader = ACRLPDDataLoader(rl_config, device_sharding=data_sharding)
    return agent, loader, ACRLPDTrainer(agent, loader, rl_config, mesh=mesh, data_sharding=data_sharding)


def run_training_experiment(
    trainer: ACRLPDTrainer, rl_config: RLTrainConfig | None = None, args: Any = None
) -> ACRLPDPi0Agent:
    """Trains; config and arguments are those of the trainer."""
    return trainer.train()


def unified_training_interface(config_name: str, exp_name: str, **training_args: Any) -> ACRLPDPi0Agent:
    """Trains a preset, with changed fields; returns the trained agent. `acrlpd train` does more."""
    config = dataclasses.replace(get_config(config_name), exp_name=exp_name)
    config = apply_config_overrides(config, training_args)
    mesh, data_sharding, _ = setup_jax_environment(config)
    rng = jax.random.key(config.seed)
    _, loader, trainer = create_training_components(config, mesh, data_sharding, rng)
    with loader:
        return trainer.train()
