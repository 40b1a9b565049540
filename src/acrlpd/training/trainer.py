"""The trainer: one loop that feeds batches to the agent's step and looks after everything around it."""

import collections
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from acrlpd.agents import ACRLPDPi0Agent
from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.data.loader import ACRLPDDataLoader
from acrlpd.models.openpi_checkpoint import save_openpi_pi0_checkpoint
from acrlpd.monitoring.memory import device_memory
from acrlpd.training.checkpoint_items import AgentArrays, served_field, served_params, split_agent
from acrlpd.training.checkpoint_metadata import load_checkpoint_metadata, restore_rng
from acrlpd.training.checkpoints import CheckpointWriter, restore_agent, save_acrlpd_checkpoint
from acrlpd.training.clock import Clock
from acrlpd.training.distributed import AgreedStop, is_primary
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.metrics_log import MetricsLog
from acrlpd.training.out_of_memory import answer_out_of_memory
from acrlpd.training.progress import Progress
from acrlpd.training.run_directory import METRICS_FILE
from acrlpd.training.sharding import (
    FSDPSharding,
    TrainStepFn,
    abstract_train_state,
    create_fsdp_train_step_fn,
)
from acrlpd.training.signals import StopSignals
from acrlpd.training.throughput import model_flops_utilization

logger = logging.getLogger(__name__)

# Updates handed to the devices before the host waits for the oldest: the devices are never idle, the host
# never more than this ahead.
MAX_IN_FLIGHT = 2
# What an evaluation is judged by, if it reports it; higher is better.
SCORE_METRIC = "success_rate"

EvalFn = Callable[[ACRLPDPi0Agent, int], Mapping[str, float]]


class ACRLPDTrainer:
    """Trains one agent on one run directory.

    Call `initialize` or `load_checkpoint` first, then `train`. Everything that decides what the next step
    computes is in `agent`, `rng`, the loader's cursor and `step`, and all of it is in a checkpoint: a run
    that is killed and resumed computes what it would have computed.
    """

    def __init__(
        self,
        rl_config: RLTrainConfig,
        data_loader: ACRLPDDataLoader,
        sharding: FSDPSharding,
        directory: pathlib.Path,
        *,
        assets: Mapping[str, bytes] | None = None,
        eval_fn: EvalFn | None = None,
    ) -> None:
        """`assets` are files that every checkpoint carries for openpi; `eval_fn` judges an agent."""
        self.rl_config = rl_config
        self.directory = directory
        self.step = 0
        self.agent: ACRLPDPi0Agent | None = None
        self.stopped_by: int | None = None  # the signal that ended `train` early
        self.best: dict[str, float] | None = None  # step and score of the best evaluation
        self.writer = CheckpointWriter(directory, rl_config)
        self.metrics_log = MetricsLog(
            directory / METRICS_FILE if is_primary() else None, rl_config.training.log_frequency
        )
        self.clock = Clock()
        self.steps_per_epoch = _steps_per_epoch(data_loader)
        self._loader = data_loader
        self._sharding = sharding
        self._assets = dict(assets or {})
        self._eval_fn = eval_fn
        self._evaluations_without_improvement = 0
        self._rng = jax.random.key(rl_config.seed)
        self._train_steps: dict[bool, TrainStepFn] = {}  # by whether the policy is updated
        self._in_flight: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self._progress: Progress | None = None
        self._signals = StopSignals()
        self._agreed_stop = AgreedStop(MAX_IN_FLIGHT)
        self._started = time.monotonic()
        self._earlier_wall_time_s = 0.0
        self._first_step: int | None = None  # of this process; it is not timed

    # -- state ---------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """The agent at step 0, with the weights that the config names."""
        init_rng, self._rng = jax.random.split(jax.random.key(self.rl_config.seed))
        self.agent = create_initial_agent(self.rl_config, self._sharding, init_rng)
        self.metrics_log.load_state_dict({"names": [], "window": []}, step=0)

    def load_checkpoint(self, step_directory: pathlib.Path) -> None:
        """The run as it was when this checkpoint was written."""
        metadata = load_checkpoint_metadata(step_directory)
        abstract = abstract_train_state(self.rl_config, self._sharding)
        self.agent = restore_agent(step_directory, abstract, metadata["served"])
        self.step = self.writer.newest_step = metadata["step"]
        self._rng = restore_rng(metadata)
        self._loader.load_state_dict(metadata["data"])
        self.metrics_log.load_state_dict(metadata["metrics"], self.step)
        self.best = metadata["evaluation"]["best"]
        self._evaluations_without_improvement = metadata["evaluation"]["without_improvement"]
        self._earlier_wall_time_s = metadata["wall_time_s"]

    def save_checkpoint(self, score: float | None = None) -> None:
        """Starts to write the run as it is now; returns when training may go on."""
        self._collect(leave=0)
        with self.clock.measure("checkpoint"):
            save_acrlpd_checkpoint(
                self.writer,
                self._current_agent(),
                self.rl_config,
                self.step,
                rng=self._rng,
                assets=self._assets,
                state={
                    "data": self._loader.state_dict(),
                    "metrics": self.metrics_log.state_dict(),
                    "evaluation": {
                        "best": self.best,
                        "without_improvement": self._evaluations_without_improvement,
                    },
                    "wall_time_s": self.wall_time_s,
                },
                score=score,
            )

    def save_openpi_checkpoint(self, directory: pathlib.Path) -> None:
        """Writes only what stock openpi serves: `directory`/params and `directory`/assets."""
        save_openpi_pi0_checkpoint(served_params(self._current_agent(), self.rl_config), directory)
        if is_primary():
            for name, content in self._assets.items():
                path = directory / "assets" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def arrays(self) -> AgentArrays:
        """The arrays of the agent as a checkpoint holds them."""
        agent = self._current_agent()
        return split_agent(agent, served_field(agent, self.rl_config))

    @property
    def wall_time_s(self) -> float:
        """Seconds spent on this run, in this process and in those it was resumed from."""
        return self._earlier_wall_time_s + time.monotonic() - self._started

    # -- the loop ------------------------------------------------------------------------------------

    def train(self) -> ACRLPDPi0Agent:
        """Runs the offline phase to its end, or to a signal, and saves."""
        last_step = self.rl_config.training.offline_steps
        self._progress = Progress("offline", self.step, last_step, enabled=is_primary())
        with self._signals, self._progress:
            while self.step < last_step and not self._is_over():
                self.train_epoch(self.step // self.steps_per_epoch, last_step)
            self._collect(leave=0)
            if self.stopped_by is None and self.metrics_log.has_open_line:
                self._write_line(self.step)
            self._save_for_good()
        return self._current_agent()

    def train_epoch(self, epoch: int, last_step: int) -> None:
        """Updates on one filling of the data loader's memory, about one look at each of its steps."""
        training = self.rl_config.training
        if self._loader.state_dict()["pool_seed"] != epoch:
            with self.clock.measure("data_wait"):
                self._loader.refresh_memory_pool(epoch)
        last_step = min(last_step, (epoch + 1) * self.steps_per_epoch)
        while self.step < last_step and not self._is_over():
            with self.clock.measure("data_wait"):
                batch = self._loader.sample_batch()
            self._update(batch)
            self._collect(leave=MAX_IN_FLIGHT)
            score = None
            if training.eval_frequency and self.step % training.eval_frequency == 0:
                score = self.evaluate().get(SCORE_METRIC)
            is_best = self.best is not None and self.best["step"] == self.step
            if self.step % training.save_frequency == 0 or (is_best and self.rl_config.checkpoints.keep_best):
                self.save_checkpoint(score)
            self.writer.poll()

    def _save_for_good(self) -> None:
        """Nothing more will be saved, so a save that fails is tried again, until that is too often."""
        self._wait_for_writer()
        while self.step and self.writer.newest_step != self.step:
            self.save_checkpoint()
            self._wait_for_writer()

    def _wait_for_writer(self) -> None:
        with self.clock.measure("checkpoint"):
            self.writer.wait()

    def evaluate(self) -> dict[str, float]:
        """Judges the agent, if there is somebody to judge it, and remembers the best score."""
        if self._eval_fn is None:
            return {}
        self._collect(leave=0)
        with self.clock.measure("evaluation"):
            metrics = dict(self._eval_fn(self._current_agent(), self.step))
        self.metrics_log.write_evaluation(self.step, metrics)
        score = metrics.get(SCORE_METRIC)
        if score is not None:
            if self.best is None or score > self.best["score"]:
                self.best = {"step": self.step, "score": score}
                self._evaluations_without_improvement = 0
            else:
                self._evaluations_without_improvement += 1
        return metrics

    def compile(self, batch: Batch) -> None:
        """Compiles the updates of the run for batches like this one; the first update does it otherwise."""
        warmup = self.rl_config.acrlpd.critic_warmup_steps
        last_step = self.rl_config.training.offline_steps
        wanted = {True: last_step > warmup, False: self.step < warmup}
        for update_policy in (kind for kind, is_wanted in wanted.items() if is_wanted):
            self._train_steps[update_policy] = create_fsdp_train_step_fn(
                self._current_agent(), batch, self._sharding, update_policy=update_policy
            )
        self.writer.prepare(self.arrays())

    def _update(self, batch: Batch) -> None:
        """Starts one update; the result is looked at later."""
        is_first = not self._train_steps
        with answer_out_of_memory(self.rl_config, is_first):
            if is_first:
                self.compile(batch)
            train_step = self._train_steps[self.step >= self.rl_config.acrlpd.critic_warmup_steps]
            self.agent, info = train_step(self._current_agent(), batch, self._rng)
            if is_first:
                jax.block_until_ready(info)
        self.step += 1
        self._in_flight.append((self.step, info))
        if is_first:  # compiling is not what a step costs
            logger.info(
                "first step %.1f s after the run was started; %s", time.monotonic() - self._started, device_memory()
            )
            self._first_step = self.step
            self.clock.restart()

    def _collect(self, leave: int) -> None:
        """Takes the metrics of finished updates off the devices; waits until only `leave` are under way."""
        while len(self._in_flight) > leave:
            step, info = self._in_flight.popleft()
            is_due = self.metrics_log.add(step, jax.device_get(info))
            if step != self._first_step:
                self.clock.count_step()
            if is_due:
                self._write_line(step)
            if self._progress is not None:
                self._progress.advance(step)

    def _write_line(self, step: int) -> None:
        read = self.clock.read()
        timing: dict[str, float | None] = {**read}
        if read:
            timing["samples_per_s"] = read["steps_per_s"] * self.rl_config.batch_size
            timing["mfu"] = model_flops_utilization(self.rl_config, read["steps_per_s"])
        line = self.metrics_log.write_line(step, timing)
        if self._progress is not None:
            self._progress.show(line)

    def _is_over(self) -> bool:
        """Whether the phase ends before its last step: everyone stops at a signal, or nothing improves."""
        self.stopped_by = self._agreed_stop.check(self.step, self._signals.received)
        patience = self.rl_config.training.early_stopping_patience
        return self.stopped_by is not None or 0 < patience <= self._evaluations_without_improvement

    def _current_agent(self) -> ACRLPDPi0Agent:
        if self.agent is None:
            raise RuntimeError("call initialize() or load_checkpoint() first")
        return self.agent

    def summary(self) -> dict[str, Any]:
        """How the run went, for summary.json."""
        return {
            "final_step": self.step,
            "wall_time_s": round(self.wall_time_s, 3),
            "time_s": self.clock.totals(),
            "last_metrics": self.metrics_log.last,
            "best_evaluation": self.best,
            "failed_saves": self.writer.num_failures,
            "peak_device_bytes": device_memory().peak,
        }

    def close(self) -> None:
        """Ends threads; the trainer cannot be used afterwards."""
        self.writer.close()


def _steps_per_epoch(loader: ACRLPDDataLoader) -> int:
    """Updates after which as many windows were drawn as the loader has steps within reach."""
    statistics = loader.get_dataset_statistics()
    share = statistics["num_sampled_episodes"] / statistics["num_episodes"]
    return max(1, round(share * statistics["num_frames"] / loader.batch_size))
