"""Tiny training runs in this process, with faults in their data where a test wants them."""

import dataclasses
import inspect
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest

from acrlpd.batch import Batch, Feed, StackedBatches
from acrlpd.config import RepackConfig, RLTrainConfig, apply_config_overrides, get_config
from acrlpd.config.create_agent import run_keys
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.files import read_json_lines
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.training import drive
from acrlpd.training.drive import Arena
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.learner import Learner
from acrlpd.training.sharding import create_sharding
from acrlpd.training.trainer import Trainer

# Compiled updates by what they depend on: runs that differ in nothing else share them.
_COMPILED: dict[str, Any] = {}

# Given the step that a batch is for, returns the batch that the trainer gets.
Fault = Callable[[int, Batch], Batch]
# What an update takes by the clock of these runs.
UPDATE_S = 0.01


class DrivenTime:
    """Stands in for the module `time` where a run measures its updates, and moves only when a test moves it.

    What a run says about its speed then depends on the test alone, however busy the machine is.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def state_config(directory: pathlib.Path, **overrides: Any) -> RLTrainConfig:
    """All losses on the state-space policy, a line of metrics per update; compiles in seconds."""
    base = get_config("debug")
    config = dataclasses.replace(
        base,
        model=StateFlowPolicyConfig(state_dim=7, action_dim=7, action_horizon=10, hidden_dims=(32, 32)),
        data=dataclasses.replace(base.data, repack=RepackConfig()),
        critic=dataclasses.replace(base.critic, use_pi0_features=False, num_critics=4, hidden_dims=(32, 32)),
    )
    changes = {
        "batch_size": 64,
        "data.on_device": "never",  # faults are faults of batches
        "qchunking.horizon_length": 10,
        "acrlpd.learnable_temperature": True,
        "acrlpd.sampling_steps": 2,
        "training.log_frequency": 1,
        "training.save_frequency": 10**6,
        "training.eval_frequency": 0,
        "checkpoints.directory": str(directory),
        "checkpoints.keep_period": None,
    }
    changes |= {key.replace("__", "."): value for key, value in overrides.items()}
    return apply_config_overrides(config, changes)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind."""

    directory: pathlib.Path
    lines: list[dict[str, Any]]
    anomalies: list[dict[str, Any]]  # every line of anomalies.jsonl

    def first(self, kind: str) -> dict[str, Any]:
        """How the first episode of this kind was reported."""
        return next(entry for entry in self.anomalies if entry["kind"] == kind)

    def episodes(self, kind: str) -> set[int]:
        """Steps at which this kind was noticed."""
        return {entry["step"] for entry in self.anomalies if entry["kind"] == kind}


def train(
    config: RLTrainConfig,
    directory: pathlib.Path,
    *,
    fault: Fault | None = None,
    time: DrivenTime | None = None,
    profile_steps: tuple[int, int] | None = None,
    resume: bool = False,
    eval_fn: Callable[..., Mapping[str, float]] | None = None,
) -> Run:
    """Trains as the config says; with `resume`, from the newest checkpoint in the directory.

    By the run's clock an update takes `UPDATE_S`, and waiting for its data takes what `fault` adds to `time`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sharding = create_sharding(config)
    with create_data_loader(config, device_sharding=sharding.data) as loader, pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            sample_feed = loader.sample_feed

            def with_fault(num_updates: int) -> Feed:
                """Calls make one update each, because there is a line of metrics per update."""
                feed = sample_feed(num_updates)
                assert num_updates == 1 and isinstance(feed, StackedBatches)
                return feed.replace(batches=fault(trainer.step + 1, feed.batches))

            loader.sample_feed = with_fault  # type: ignore[method-assign]
        trainer = Trainer(
            config,
            loader,
            Learner(sharding),
            directory,
            profile_steps=profile_steps,
            is_evaluated=eval_fn is not None,
        )
        drive_clock(trainer, time or DrivenTime(), patch)
        if resume:
            trainer.load_checkpoint(max(directory.glob("[0-9]*"), key=lambda path: int(path.name)))
        else:
            trainer.initialize(create_initial_agent(config, sharding, run_keys(config).initial))
        if compiled := _COMPILED.get(_computation(config)):
            trainer.learner.programs, trainer.learner.feed_shapes = compiled
            trainer.writer.prepare(trainer.agent)
        drive.train([trainer], [Arena((0,), eval_fn=eval_fn)])
        _COMPILED[_computation(config)] = trainer.learner.programs, trainer.learner.feed_shapes
        trainer.close()
    return read_run(directory)


def drive_clock(trainer: Trainer, time: DrivenTime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inspect.getmodule(type(trainer.clock)), "time", time)
    trainer.clock.restart()
    on_line = trainer.monitor.on_line

    def advance(line: Mapping[str, Any]) -> dict[str, float]:
        time.advance(UPDATE_S)  # there is a line per update
        return on_line(line)

    patch.setattr(trainer.monitor, "on_line", advance)


def _computation(config: RLTrainConfig) -> str:
    """What decides which program an update is."""
    default = get_config("debug")
    return repr(
        dataclasses.replace(
            config, logging=default.logging, checkpoints=default.checkpoints, training=default.training, exp_name=""
        )
    )


def read_run(directory: pathlib.Path) -> Run:
    path = directory / "anomalies.jsonl"
    anomalies = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Run(directory, read_json_lines(directory / "metrics.jsonl"), anomalies)


def with_rewards(batch: Batch, value: float) -> Batch:
    return dataclasses.replace(batch, rewards=jax.tree.map(lambda x: x * 0 + value, batch.rewards))
