"""The trainer: one run from its first update to its last, with everything that happens around the updates."""

import collections
import logging
import math
import pathlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import jax

from acrlpd.agents import Agent, Call, MetricsTable
from acrlpd.batch import Feed
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import follow_config, run_keys
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.evaluation.validation import Validator
from acrlpd.files import copy_directory
from acrlpd.monitoring.run_monitor import RunMonitor, device_memory
from acrlpd.runs import metrics_log
from acrlpd.runs.checkpoint_layout import load_checkpoint_metadata
from acrlpd.runs.directory import METRICS_FILE
from acrlpd.runs.metrics_log import MetricsLog
from acrlpd.runs.record import EVALUATIONS
from acrlpd.training.calls import create_call_lengths, next_multiple
from acrlpd.training.checkpoints.metadata import HELD_OUT, RESUMED_STATE, restore_rng
from acrlpd.training.checkpoints.reader import restore_agent
from acrlpd.training.checkpoints.writer import CheckpointWriter
from acrlpd.training.distributed import is_primary, numbers_of_first_process
from acrlpd.training.evaluation_history import EvaluationHistory
from acrlpd.training.learner import Learner
from acrlpd.training.online.loss_weights import scheduled_weights
from acrlpd.training.online.phase import OnlinePhase
from acrlpd.training.progress import Clock, Progress, ProgressBars, describe_metrics, model_flops_utilization
from acrlpd.training.sharding import abstract_train_state
from acrlpd.training.stopping import StopRequest
from acrlpd.training.wishes import Made, NextEvaluation, NextRound, Updates, Wish, Wishes

logger = logging.getLogger(__name__)

# The host hands this many calls to the devices before it waits for the oldest one. The devices are then never idle,
# and the host is never further ahead.
MAX_IN_FLIGHT = 2

OFFLINE, ONLINE = "offline", "online"


class Trainer:
    """Trains one agent in one run directory.

    Call `initialize` or `load_checkpoint` first, then `drive.train` with this trainer, alone or with others. Agent,
    random key, the loader's cursor and the step decide what the next update computes, and a checkpoint holds all of
    them: a run that is killed and resumed computes what it would have computed.
    """

    def __init__(
        self,
        rl_config: RLTrainConfig,
        data_loader: DataLoader,
        learner: Learner,
        directory: pathlib.Path,
        *,
        run: int = 0,
        stop: StopRequest | None = None,
        bars: ProgressBars | None = None,
        assets: Mapping[str, bytes] | None = None,
        is_evaluated: bool = False,
        validator: Validator | None = None,
        online: OnlinePhase | None = None,
        offline_copy: pathlib.Path | None = None,
        profile_steps: tuple[int, int] | None = None,
    ) -> None:
        """`run` is the number of this run in the learner, to which the trainers add their agents in order.

        Runs that train together share `stop` and `bars`. `assets` are files that every checkpoint carries for openpi.
        `is_evaluated` says whether the driver can evaluate the agent; a `validator` judges the agent as well.
        With `online` the online phase follows the offline phase. `offline_copy` is a directory that gets a copy of the
        checkpoint between the phases, from which another run goes on. `profile_steps` (a, b) traces the updates after
        step a up to step b.
        """
        self.rl_config = rl_config
        self.directory = directory
        self.step = 0
        self.stopped_by: int | None = None  # the signal that ended the run early
        self.online_start: int | None = None  # the step at which the online phase began
        self.evaluations = EvaluationHistory(rl_config.training.early_stopping_patience, rl_config.evaluation.score)
        self.writer = CheckpointWriter(directory, rl_config, assets or {})
        self.metrics_log = MetricsLog(
            directory / METRICS_FILE if is_primary() else None, rl_config.training.log_frequency
        )
        self.monitor = RunMonitor(rl_config, directory, is_primary=is_primary(), profile_steps=profile_steps)
        self.clock = Clock()
        self._loader = data_loader
        self.learner = learner
        self.online = online
        self._run = run
        self._is_evaluated = is_evaluated
        self._validator = validator
        self._offline_copy = offline_copy
        self._rng: jax.Array  # the key of the run, set with the agent
        self._calls = create_call_lengths(rl_config, data_loader.capacity, one_by_one=self.monitor.looks_at_updates)
        # The calls under way: their last step, their length, and their metrics.
        self._in_flight: collections.deque[tuple[int, int, MetricsTable]] = collections.deque()
        self._progress: Progress | None = None
        self._bars = bars or ProgressBars(enabled=is_primary())
        self.stop = stop or StopRequest()
        self.stop.allow_for(MAX_IN_FLIGHT * self._calls.most)
        self.started = time.monotonic()
        self._earlier_wall_time_s = 0.0
        self._untimed_step: int | None = None  # the last step of the call for which the train step was compiled last

    # -- state ---------------------------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        """The agent after the updates that were started so far; `initialize` or `load_checkpoint` creates it."""
        return self.learner.agents[self._run]

    def initialize(self, agent: Agent) -> None:
        """Starts the run with an agent whose arrays lie in their places. Training uses the arrays up."""
        self._rng, self.step = run_keys(self.rl_config).updates, int(agent.step)
        self.learner.add(agent)
        # A run that was killed before its first checkpoint leaves metrics; they are all written again.
        self.metrics_log.load_state_dict({"window": []}, step=-1)
        self.monitor.load_state_dict(None, step=-1)

    def load_checkpoint(self, step_directory: pathlib.Path) -> None:
        """Puts the run into the state in which this checkpoint was written."""
        metadata = load_checkpoint_metadata(step_directory, RESUMED_STATE)
        abstract = abstract_train_state(self.rl_config, self.learner.sharding)
        self.learner.add(follow_config(restore_agent(step_directory, abstract), self.rl_config))
        self.step = self.writer.newest_step = metadata["step"]
        self._rng = restore_rng(metadata)
        self._loader.load_state_dict(metadata["data"])
        self.metrics_log.load_state_dict(metadata["metrics"], self.step)
        self.monitor.load_state_dict(metadata["monitor"], self.step)
        self.evaluations.load_state_dict(metadata["evaluation"])
        self.online_start = metadata["online_start"]
        if self.online is not None and metadata["online"] is not None:
            self.online.load_state_dict(metadata["online"])
        self._earlier_wall_time_s = metadata["wall_time_s"]

    def save_checkpoint(self) -> None:
        """Starts to write the run as it is now; returns when training may go on."""
        self._collect(leave=0)
        with self.clock.measure("checkpoint"):
            self.writer.save(
                self.agent,
                self.step,
                rng=self._rng,
                state={
                    "data": self._loader.state_dict(),
                    HELD_OUT: self._loader.dataset.held_out_indices,
                    "reward_origin": self._loader.dataset.rewards.origin.name,
                    "metrics": self.metrics_log.state_dict(),
                    "monitor": self.monitor.state_dict(),
                    "evaluation": self.evaluations.state_dict(),
                    "phase": self.phase,
                    "online_start": self.online_start,
                    "online": None if self.online is None else self.online.state_dict(),
                    "wall_time_s": self.wall_time_s,
                },
                score=self.evaluations.best_rank(self.step),
            )

    @property
    def phase(self) -> str:
        return OFFLINE if self.online_start is None else ONLINE

    @property
    def wall_time_s(self) -> float:
        """Seconds spent on this run, in this process and in the processes before it."""
        return self._earlier_wall_time_s + time.monotonic() - self.started

    # -- the loop ------------------------------------------------------------------------------------

    def run(self) -> Wishes:
        """Runs the phases to their end, or until a signal, and saves."""
        training = self.rl_config.training
        if self.phase == OFFLINE:
            yield from self._run_phase(training.offline_steps)
            if self.online is not None and self.stopped_by is None:
                if self._offline_copy is not None and is_primary():
                    copy_directory(self.directory / str(self.step), self._offline_copy / str(self.step))
                self.online_start = self.step
                self.evaluations.begin_phase()
        if self.online_start is not None and self.stopped_by is None:
            yield from self._run_phase(self.online_start + training.online_steps)

    def _run_phase(self, last_step: int) -> Wishes:
        """Trains until the phase is over, then evaluates the policy and saves."""
        name = self.rl_config.exp_name if len(self.learner.agents) > 1 else None
        with Progress(self._bars, self.phase, self.step, last_step, run=name) as self._progress:
            yield from self.train_until(last_step)
            self._collect(leave=0)
            if self.stopped_by is None and self.metrics_log.has_open_line:
                self._write_line(self.step)
        if self.stopped_by is None and not self.evaluations.has(self.phase, self.step):
            yield from self.evaluate()
        self._save_for_good()

    def train_until(self, last_step: int) -> Wishes:
        """Trains up to `last_step`, or until the phase ends earlier."""
        while self.step < last_step and not self._is_over():
            if self.phase == ONLINE and not (yield from self._act()):
                continue  # A signal came before the round.
            most = self._calls.next(self.step, last_step, *self._stops())
            self._begin_call((yield Updates(most, self._updates_policy())))
            self._collect(leave=MAX_IN_FLIGHT)
            if self._eval_frequency and self.step % self._eval_frequency == 0:
                yield from self.evaluate()
            is_due = self.step % self.rl_config.training.save_frequency == 0
            is_end = self.step == last_step or self.evaluations.is_out_of_patience  # `_run_phase` saves
            is_best = self.evaluations.best_rank(self.step) is not None
            if (is_due or (is_best and self.rl_config.checkpoints.keep_best)) and not is_end:
                self.save_checkpoint()
            self.writer.poll()

    def _stops(self) -> Iterator[int]:
        """Steps after which something happens that needs the agent, the metrics or the devices of that moment."""
        training = self.rl_config.training
        for frequency in (training.log_frequency, training.save_frequency, self._eval_frequency):
            if frequency:
                yield next_multiple(self.step, frequency)
        if self.online_start is None:
            yield self.rl_config.acrlpd.critic_warmup_steps
        else:
            assert self.online is not None
            yield self.online_start + self.rl_config.online.critic_warmup_steps
            yield self.step + self.online.updates_ahead(self.step, self.step - self.online_start)

    def _act(self) -> Generator[Wish, Any, bool]:
        """Plays the episodes that the next update of the online phase needs; returns whether the run can go on."""
        assert self.online is not None and self.online_start is not None
        update = self.step - self.online_start
        if self.online.needs_round(update):
            self._collect(leave=0)  # playing waits for the policy anyway; this time belongs to the updates
        with self.clock.measure("rollouts"):
            self.online.begin(self.agent, self.step)
            while (number := self.online.missing_round(update)) is not None:
                if (next_round := (yield NextRound(number))) is None:
                    return False
                self.online.add(next_round)
            played = self.online.take()
        if played:
            self._collect(leave=0)  # lines of metrics have their place in the file, however long the calls are
        for metrics in played:
            self._write_event(self.step + 1, metrics_log.ONLINE, metrics)
        return True

    def _call(self, feed: Feed) -> Call:
        """A call with the weights that the losses have in the next updates."""
        start = None if self.online is None else self.online_start
        update = None if start is None else self.step - start
        weights = scheduled_weights(self.rl_config, update, self._loader.capacity)
        return Call(feed, rng=self._rng, **weights)

    @property
    def _eval_frequency(self) -> int:
        """The policy changes faster online, so the online phase evaluates twice as often."""
        frequency = self.rl_config.training.eval_frequency
        return math.ceil(frequency / 2) if self.phase == ONLINE else frequency

    def _save_for_good(self) -> None:
        """Saves the end of a phase. A save that fails is tried again until the writer gives up with an error."""
        while True:
            with self.clock.measure("checkpoint"):
                self.writer.wait()
            self.metrics_log.flush()  # no later line would take along those for which there was no space
            if self.step in (0, self.writer.newest_step):
                return
            self.save_checkpoint()

    def evaluate(self) -> Wishes:
        """Judges the agent in its environment and by held-out episodes, if there are any. Process 0 decides for all."""
        if not self._is_evaluated and self._validator is None:
            return
        self._collect(leave=0)
        metrics, validation = {}, {}
        records = self.directory / EVALUATIONS if is_primary() else None
        with self.clock.measure("evaluation"):
            if self._is_evaluated:
                metrics = numbers_of_first_process((yield NextEvaluation()))
            if self._validator is not None:
                found_here = self._validator.judge_at_step(self.agent, self.step, records)
                validation = numbers_of_first_process(found_here)
        for kind, found in ((metrics_log.EVALUATION, metrics), (metrics_log.VALIDATION, validation)):
            if found:
                self._write_event(self.step, kind, found)
        named = {f"{metrics_log.VALIDATION}{name}": value for name, value in validation.items()}
        self.evaluations.add(self.phase, self.step, metrics | named)

    # -- calls of the train step ---------------------------------------------------------------------

    def kinds_ahead(self) -> set[bool]:
        """Which updates the rest of the run makes: those with the policy (True), those of the critics alone (False)."""
        training, online = self.rl_config.training, self.rl_config.online
        offline_warmup = self.rl_config.acrlpd.critic_warmup_steps
        warmup_ahead = self.step < offline_warmup or (self.online is not None and online.critic_warmup_steps > 0)
        policy_ahead = training.offline_steps > offline_warmup or self.online is not None
        return {kind for kind, is_ahead in ((True, policy_ahead), (False, warmup_ahead)) if is_ahead}

    def prepare_to_compile(self) -> None:
        """Waits for the devices, and compiles what the run needs beside the train step."""
        self._collect(leave=0)
        self.writer.prepare(self.agent)
        if self._validator is not None:
            self._validator.compile(self.agent)

    def create_call(self, num_updates: int) -> Call:
        """What this run brings to a call of the train step; draws the batches of the updates."""
        with self.clock.measure("data_wait"):
            feed = self._loader.sample_feed(num_updates)
        return self._call(feed)

    def before_call(self, call: Call) -> None:
        """The updates of this call are about to begin."""
        self.monitor.before_update(self.step + 1, self.agent, call.feed, call.rng)

    def create_idle_call(self) -> Call | None:
        """A call for a place in the joint train step whose result is not used; None if any other call can be used."""
        feed = self._loader.idle_feed()
        return None if feed is None else self._call(feed)

    def _begin_call(self, made: Made) -> None:
        """The devices have begun with the updates of one call; `_collect` reads their results later."""
        policy_is_updated = self._updates_policy()
        self.step += made.num_updates
        self._in_flight.append((self.step, made.num_updates, made.metrics))
        self.monitor.after_update(self.step, made.metrics, self.learner.programs[policy_is_updated])
        if made.has_compiled:  # The time to compile is not part of the time of a step.
            self._untimed_step = self.step
            self.clock.restart()

    def _updates_policy(self) -> bool:
        """Whether the warm-up of the critics in this phase is over."""
        if self.online_start is not None:
            return self.step - self.online_start >= self.rl_config.online.critic_warmup_steps
        return self.step >= self.rl_config.acrlpd.critic_warmup_steps

    def _collect(self, leave: int) -> None:
        """Fetches the metrics of finished calls; waits until at most `leave` calls are under way."""
        while len(self._in_flight) > leave:
            last_step, num_updates, metrics = self._in_flight.popleft()
            rows = metrics.rows(num_updates, self._run)
            self._calls.end(num_updates)
            if last_step != self._untimed_step:
                self.clock.count_steps(num_updates)
            for step, info in enumerate(rows, last_step - num_updates + 1):
                if self.metrics_log.add(step, info):
                    self._write_line(step)
            if self._progress is not None:
                self._progress.advance_to(last_step)
        if leave == 0:
            self._calls.pause()

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
        logger.info("%s", describe_metrics(step, kind, metrics))

    def _is_over(self) -> bool:
        """Whether the phase ends before its last step: because of a signal, or because nothing improves."""
        self.stopped_by = self.stop.check(self.step)
        return self.stopped_by is not None or self.evaluations.is_out_of_patience

    def summary(self) -> dict[str, Any]:
        """The course of the run, for summary.json."""
        return {
            "final_step": self.step,
            "wall_time_s": round(self.wall_time_s, 3),
            "time_s": self.clock.totals(),
            "last_metrics": self.metrics_log.last,
            "evaluation": self.evaluations.phases,
            "best_evaluation": self.evaluations.best,
            "online": None if self.online is None else dict(self.online.totals),
            "failed_saves": self.writer.num_failures,
            "peak_device_bytes": device_memory().peak,
        }

    def close(self) -> None:
        """Ends the threads and processes of the trainer, which cannot be used afterwards."""
        self.writer.close()
        self.monitor.close()
        if self.online is not None:
            self.online.close()
