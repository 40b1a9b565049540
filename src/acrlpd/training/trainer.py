"""The trainer: one loop that feeds batches to the agent's step and looks after everything around it."""

import collections
import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from acrlpd.agents import Agent
from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import follow_config
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.models.openpi_checkpoint import save_openpi_pi0_checkpoint
from acrlpd.monitoring.memory import device_memory
from acrlpd.monitoring.run_monitor import RunMonitor
from acrlpd.runs import metrics_log
from acrlpd.runs.directory import METRICS_FILE
from acrlpd.runs.metrics_log import MetricsLog
from acrlpd.training.checkpoints.items import AgentArrays, served_field, served_params, split_agent
from acrlpd.training.checkpoints.manager import (
    CheckpointWriter,
    copy_checkpoint,
    restore_agent,
    save_acrlpd_checkpoint,
)
from acrlpd.training.checkpoints.metadata import load_checkpoint_metadata, restore_rng
from acrlpd.training.clock import Clock
from acrlpd.training.distributed import AgreedStop, barrier, is_primary
from acrlpd.training.evaluation_record import EvaluationRecord
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.online.phase import OnlinePhase
from acrlpd.training.out_of_memory import answer_out_of_memory
from acrlpd.training.progress import Progress
from acrlpd.training.sharding import (
    FSDPSharding,
    abstract_train_state,
    compile_train_step,
)
from acrlpd.training.signals import StopSignals
from acrlpd.training.throughput import model_flops_utilization

logger = logging.getLogger(__name__)

# Updates handed to the devices before the host waits for the oldest: the devices are never idle, the host
# never more than this ahead.
MAX_IN_FLIGHT = 2

OFFLINE, ONLINE = "offline", "online"

EvalFn = Callable[[Agent, int], Mapping[str, float]]


class Trainer:
    """Trains one agent on one run directory.

    Call `initialize` or `load_checkpoint` first, then `train`. Everything that decides what the next step
    computes is in `agent`, `rng`, the loader's cursor and `step`, and all of it is in a checkpoint: a run
    that is killed and resumed computes what it would have computed.
    """

    def __init__(
        self,
        rl_config: RLTrainConfig,
        data_loader: DataLoader,
        sharding: FSDPSharding,
        directory: pathlib.Path,
        *,
        assets: Mapping[str, bytes] | None = None,
        eval_fn: EvalFn | None = None,
        online: OnlinePhase | None = None,
        offline_copy: pathlib.Path | None = None,
        profile_steps: tuple[int, int] | None = None,
    ) -> None:
        """`assets` are files that every checkpoint carries for openpi; `eval_fn` judges an agent.

        With `online` the offline phase is followed by the online phase. `offline_copy` is a directory that
        gets a copy of the checkpoint between the two, from which somebody else goes on. `profile_steps`
        (a, b) traces the updates after step a up to step b.
        """
        self.rl_config = rl_config
        self.directory = directory
        self.step = 0
        self.agent: Agent | None = None
        self.stopped_by: int | None = None  # the signal that ended `train` early
        self.phase = OFFLINE
        self.online_start: int | None = None  # the step at which the online phase began
        self.evaluations = EvaluationRecord(rl_config.training.early_stopping_patience)
        self.writer = CheckpointWriter(directory, rl_config)
        self.metrics_log = MetricsLog(
            directory / METRICS_FILE if is_primary() else None, rl_config.training.log_frequency
        )
        self.monitor = RunMonitor(rl_config, directory, is_primary=is_primary(), profile_steps=profile_steps)
        self.clock = Clock()
        self.steps_per_epoch = data_loader.steps_per_epoch
        self._loader = data_loader
        self._sharding = sharding
        self._assets = dict(assets or {})
        self._eval_fn = eval_fn
        self._online = online
        self._offline_copy = offline_copy
        self._rng = jax.random.key(rl_config.seed)
        self._train_steps: dict[bool, jax.stages.Compiled] = {}  # by whether the policy is updated
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
        # Of a run that was killed before its first checkpoint nothing stays, not even the evaluation of step 0.
        self.metrics_log.load_state_dict({"window": []}, step=-1)
        self.monitor.load_state_dict(None, step=-1)

    def load_checkpoint(self, step_directory: pathlib.Path) -> None:
        """The run as it was when this checkpoint was written."""
        metadata = load_checkpoint_metadata(step_directory)
        abstract = abstract_train_state(self.rl_config, self._sharding)
        self.agent = follow_config(restore_agent(step_directory, abstract, metadata["served"]), self.rl_config)
        self.step = self.writer.newest_step = metadata["step"]
        self._rng = restore_rng(metadata)
        self._loader.load_state_dict(metadata["data"])
        self.metrics_log.load_state_dict(metadata["metrics"], self.step)
        self.monitor.load_state_dict(metadata.get("monitor"), self.step)
        self.evaluations.load_state_dict(metadata["evaluation"])
        self.phase, self.online_start = metadata["phase"], metadata["online_start"]
        if self._online is not None and metadata["online"] is not None:
            self._online.load_state_dict(metadata["online"])
        self._earlier_wall_time_s = metadata["wall_time_s"]

    def save_checkpoint(self) -> None:
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
                    "reward_origin": self._loader.dataset.rewards.origin,
                    "metrics": self.metrics_log.state_dict(),
                    "monitor": self.monitor.state_dict(),
                    "evaluation": self.evaluations.state_dict(),
                    "phase": self.phase,
                    "online_start": self.online_start,
                    "online": None if self._online is None else self._online.state_dict(),
                    "wall_time_s": self.wall_time_s,
                },
                score=self.evaluations.best_score(self.step),
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

    def train(self) -> Agent:
        """Runs the phases to their end, or to a signal, and saves."""
        training = self.rl_config.training
        with self._signals:
            if self.phase == OFFLINE:
                self._run_phase(training.offline_steps)
                if self._online is not None and self.stopped_by is None:
                    self._begin_online()
            if self.online_start is not None and self.stopped_by is None:
                self._run_phase(self.online_start + training.online_steps)
        return self._current_agent()

    def _run_phase(self, last_step: int) -> None:
        """Updates until the phase is over; then judges the policy and saves all that is known by then."""
        self._progress = Progress(self.phase, self.step, last_step, enabled=is_primary())
        with self._progress:
            while self.step < last_step and not self._is_over():
                self.train_epoch(self.step // self.steps_per_epoch, last_step)
            self._collect(leave=0)
            if self.stopped_by is None and self.metrics_log.has_open_line:
                self._write_line(self.step)
        if self.stopped_by is None and not self.evaluations.is_of(self.phase, self.step):
            self.evaluate()
        self._save_for_good()

    def _begin_online(self) -> None:
        """From here on the policy acts."""
        if self._offline_copy is not None and is_primary():
            copy_checkpoint(self.directory / str(self.step), self._offline_copy)
        self.phase, self.online_start = ONLINE, self.step
        self.evaluations.begin_phase()

    def train_epoch(self, epoch: int, last_step: int) -> None:
        """Updates on one filling of the data loader's memory, about one look at each of its steps."""
        if self._loader.state_dict()["pool_seed"] != epoch:
            with self.clock.measure("data_wait"):
                self._loader.refresh_memory_pool(epoch)
        epoch_end = min(last_step, (epoch + 1) * self.steps_per_epoch)
        while self.step < epoch_end and not self._is_over():
            if self.phase == ONLINE:
                self._act()
            with self.clock.measure("data_wait"):
                batch = self._loader.sample_batch()
            self._update(batch)
            self._collect(leave=MAX_IN_FLIGHT)
            if self._is_evaluation_due():
                self.evaluate()
            is_due = self.step % self.rl_config.training.save_frequency == 0
            is_end = self.step == last_step or self.evaluations.is_out_of_patience  # saved when all of it is known
            is_best = self.evaluations.best_score(self.step) is not None
            if (is_due or (is_best and self.rl_config.checkpoints.keep_best)) and not is_end:
                self.save_checkpoint()
            self.writer.poll()

    def _act(self) -> None:
        """Plays what the next update of the online phase needs, and sets how much it clones."""
        assert self._online is not None and self.online_start is not None
        agent, update = self._current_agent(), self.step - self.online_start
        with self.clock.measure("rollouts"):
            played = self._online.prepare(agent, self.step, update)
        for metrics in played:
            self._write_event(self.step + 1, metrics_log.ONLINE, metrics)
        bc_weight = jax.device_put(np.float32(self._online.bc_weight(update)), self._sharding.replicated)
        self.agent = agent.replace(loss_weights=dataclasses.replace(agent.loss_weights, bc_weight=bc_weight))

    def _is_evaluation_due(self) -> bool:
        """Online the policy changes faster, so it is judged twice as often."""
        frequency = self.rl_config.training.eval_frequency
        if self.phase == ONLINE:
            frequency = math.ceil(frequency / 2)
        return frequency > 0 and self.step % frequency == 0

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
        self._write_event(self.step, metrics_log.EVALUATION, metrics)
        self.evaluations.add(self.phase, self.step, metrics)
        return metrics

    def compile(self, batch: Batch) -> None:
        """Compiles the updates of the run for batches like this one; the first update does it otherwise."""
        training, online = self.rl_config.training, self.rl_config.online
        offline_warmup = self.rl_config.acrlpd.critic_warmup_steps
        warmup_ahead = self.step < offline_warmup or (self._online is not None and online.critic_warmup_steps > 0)
        policy_ahead = training.offline_steps > offline_warmup or self._online is not None
        wanted = {True: policy_ahead, False: warmup_ahead}
        for update_policy in (kind for kind, is_wanted in wanted.items() if is_wanted):
            self._train_steps[update_policy] = compile_train_step(
                self._current_agent(), batch, self._sharding, update_policy=update_policy
            )
        self.writer.prepare(self.arrays())
        # One may have found its program in the cache; the first collective does not wait minutes for the others.
        barrier(f"compiled with {training.gradient_accumulation_steps} micro-batches")

    def _update(self, batch: Batch) -> None:
        """Starts one update; the result is looked at later."""
        is_first = not self._train_steps
        with answer_out_of_memory(self.rl_config, is_first):
            if is_first:
                self.compile(batch)
            train_step = self._train_steps[self._updates_policy()]
            self.monitor.before_update(self.step + 1, self._current_agent(), batch, self._rng)
            self.agent, info = train_step(self._current_agent(), batch, self._rng)
            if is_first:
                jax.block_until_ready(info)
        self.step += 1
        self._in_flight.append((self.step, info))
        self.monitor.after_update(self.step, info, train_step)
        if is_first:  # compiling is not what a step costs
            logger.info(
                "first step %.1f s after the run was started; %s", time.monotonic() - self._started, device_memory()
            )
            self._first_step = self.step
            self.clock.restart()

    def _updates_policy(self) -> bool:
        """Whether the next update is past the critics' warm-up of its phase."""
        if self.online_start is not None:
            return self.step - self.online_start >= self.rl_config.online.critic_warmup_steps
        return self.step >= self.rl_config.acrlpd.critic_warmup_steps

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
        line = self.metrics_log.write_line(step, self.phase, timing, self.monitor.on_line)
        if self._progress is not None:
            self._progress.show(line)

    def _write_event(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        self.monitor.on_event(self.metrics_log.write_event(step, kind, metrics))

    def _is_over(self) -> bool:
        """Whether the phase ends before its last step: everyone stops at a signal, or nothing improves."""
        self.stopped_by = self._agreed_stop.check(self.step, self._signals.received)
        return self.stopped_by is not None or self.evaluations.is_out_of_patience

    def _current_agent(self) -> Agent:
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
            "evaluation": self.evaluations.phases,
            "best_evaluation": self.evaluations.best,
            "online": None if self._online is None else self._online.summary(),
            "failed_saves": self.writer.num_failures,
            "peak_device_bytes": device_memory().peak,
        }

    def close(self) -> None:
        """Ends threads and processes; the trainer cannot be used afterwards."""
        self.writer.close()
        self.monitor.close()
        if self._online is not None:
            self._online.close()
