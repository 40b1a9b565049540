"""One run from config to summary: directory, devices, data, weights or checkpoint, training."""

import contextlib
import functools
import logging
import pathlib
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence

import jax

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.data.pipeline.dataset import norm_stats_dir
from acrlpd.data.pipeline.loader import DataLoader, create_data_loader
from acrlpd.data.pipeline.replay_dataset import ReplayDataset
from acrlpd.data.sources.source import Feature
from acrlpd.envs.env import EnvSpec
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.monitoring.report import generate_training_report
from acrlpd.runs import directory as runs
from acrlpd.runs.record import RunError
from acrlpd.training.checkpoints.metadata import check_resume
from acrlpd.training.comparison import (
    CHANGED_BY_BASELINES,
    OFFLINE_CONTINUED,
    baseline_config,
    baseline_directory,
    write_comparison,
)
from acrlpd.training.compilation_cache import enable_compilation_cache
from acrlpd.training.distributed import barrier, is_primary
from acrlpd.training.host_memory import keep_freed_memory
from acrlpd.training.initial_weights import check_initial_weights
from acrlpd.training.online.actor_process import ActorProcess
from acrlpd.training.online.phase import OnlinePhase, Player, SynchronousPlayer
from acrlpd.training.online.rounds import RoundPlayer, acting_candidates, open_replay
from acrlpd.training.out_of_memory import OutOfMemoryError
from acrlpd.training.sharding import create_sharding, validate_fsdp_sharding
from acrlpd.training.signals import exit_code
from acrlpd.training.throughput import planned_costs
from acrlpd.training.trainer import EvalFn, Trainer

logger = logging.getLogger(__name__)

EVALUATIONS = "evaluations"


def run_experiment(
    rl_config: RLTrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    auto_batch: bool = False,
    allow_changed: Sequence[str] = (),
    eval_fn: EvalFn | None = None,
    profile_steps: tuple[int, int] | None = None,
) -> int:
    """Trains as the config says; returns the exit code: 0, or 128 + the signal that ended it.

    `dry_run` does everything but the steps and leaves no trace; `auto_batch` answers a first step that
    does not fit with more micro-batches; `allow_changed` names fields that may differ from the run that
    is resumed; `profile_steps` (a, b) traces the updates after step a up to step b.
    """
    setup_logging()
    enable_compilation_cache()
    keep_freed_memory()
    directory = runs.run_directory(rl_config)
    with contextlib.ExitStack() as stack:
        if is_primary() and not dry_run:
            runs.prepare_run_directory(directory, resume=resume, overwrite=overwrite)
            stack.enter_context(runs.only_trainer(directory))
        barrier("run directory")
        while True:
            try:
                if rl_config.evaluation.baselines and not dry_run:
                    code = run_comparison(
                        rl_config, directory, resume=resume, allow_changed=allow_changed, profile_steps=profile_steps
                    )
                else:
                    code = train_run(
                        rl_config,
                        directory,
                        resume=resume,
                        dry_run=dry_run,
                        allow_changed=allow_changed,
                        eval_fn=eval_fn,
                        profile_steps=profile_steps,
                    )
                break
            except OutOfMemoryError as error:
                steps = error.next_accumulation
                if not auto_batch or steps is None:
                    raise
                logger.warning("%s\n--auto_batch: trying gradient_accumulation_steps=%d", error, steps)
                rl_config = apply_config_overrides(rl_config, gradient_accumulation_steps=steps)
        if code == 0 and is_primary() and not dry_run:
            write_report(directory)
    return code


def write_report(directory: pathlib.Path) -> None:
    """The run is over and safe; a report that cannot be written does not make it a failure."""
    try:
        logger.info("report %s", generate_training_report([directory]))
    except (OSError, RunError) as error:
        logger.error("the report could not be written (%s); `acrlpd report %s` tries again", error, directory)


def run_comparison(
    rl_config: RLTrainConfig,
    directory: pathlib.Path,
    *,
    resume: bool,
    allow_changed: Sequence[str],
    profile_steps: tuple[int, int] | None = None,
) -> int:
    """The run and what it is compared with, each in a directory of its own; a finished one is not repeated.

    The baselines that only clone come first, as a person would do it; the one that goes on offline starts
    from where the run went online.
    """
    if jax.process_count() > 1:
        raise ConfigError("evaluation.baselines are judged in an environment, which needs a single process")
    if resume:
        _check_comparison(rl_config, directory, allow_changed)
    runs.write_run_config(directory, rl_config)  # it is a run's directory from the beginning
    names = rl_config.evaluation.baselines
    continued = OFFLINE_CONTINUED in names
    for name in (*(n for n in names if n != OFFLINE_CONTINUED), None, *([OFFLINE_CONTINUED] if continued else [])):
        where = directory if name is None else baseline_directory(directory, name)
        if runs.is_finished(where):
            continue
        if name is None:
            config, branch = rl_config, baseline_directory(directory, OFFLINE_CONTINUED) if continued else None
        else:
            config, branch = baseline_config(rl_config, name, runs.read_summary(directory)), None
            logger.info("baseline %s", name)
        code = train_run(
            config,
            where,
            resume=resume or name == OFFLINE_CONTINUED,
            allow_changed=(*allow_changed, *(CHANGED_BY_BASELINES if name == OFFLINE_CONTINUED else ())),
            offline_copy=branch,
            profile_steps=profile_steps if name is None else None,
        )
        if code:
            return code
    write_comparison(rl_config, directory)
    return 0


def _check_comparison(rl_config: RLTrainConfig, directory: pathlib.Path, allow_changed: Sequence[str]) -> None:
    """Refuses to go on with another config than that of the run, before anything is written."""
    steps = runs.saved_steps(directory)
    if not steps:
        return
    compatibility = check_resume(directory / str(steps[-1]), rl_config, read_assets(rl_config), allow_changed)
    if compatibility.changed and runs.is_finished(directory):
        raise ConfigError(
            f"{directory} is finished, and so is what it was compared with; it cannot be resumed with another config:\n"
            f"{compatibility.describe(compatibility.changed)}\n"
            "Choose another --exp_name, or --overwrite"
        )


def train_run(
    rl_config: RLTrainConfig,
    directory: pathlib.Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    allow_changed: Sequence[str] = (),
    eval_fn: EvalFn | None = None,
    offline_copy: pathlib.Path | None = None,
    profile_steps: tuple[int, int] | None = None,
) -> int:
    """Trains in `directory`; returns the exit code. `offline_copy` as in `Trainer`."""
    sharding = create_sharding(rl_config)
    assets = read_assets(rl_config)
    steps = runs.saved_steps(directory) if resume else []
    if steps:
        compatibility = check_resume(directory / str(steps[-1]), rl_config, assets, allow_changed)
        if compatibility.changed:
            logger.warning("resuming with changes:\n%s", compatibility.describe(compatibility.changed))
    else:
        check_initial_weights(rl_config)
    with contextlib.ExitStack() as stack:
        # A dry run leaves no trace.
        written = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) if dry_run else directory
        written.mkdir(parents=True, exist_ok=True)
        if is_primary():
            runs.write_run_config(written, rl_config)
        loader = stack.enter_context(create_data_loader(rl_config, device_sharding=sharding.data))
        protocol = _create_protocol(rl_config, written, loader, stack)
        if eval_fn is None and protocol is not None and rl_config.evaluation.num_episodes:
            eval_fn = protocol.evaluate_at_step
        online = _create_online_phase(rl_config, written, loader, protocol)
        trainer = Trainer(
            rl_config,
            loader,
            sharding,
            written,
            assets=assets,
            eval_fn=eval_fn,
            online=online,
            offline_copy=offline_copy,
            profile_steps=profile_steps,
        )
        stack.callback(trainer.close)
        if steps:
            trainer.load_checkpoint(directory / str(steps[-1]))
            logger.info("resuming %s after step %d", directory, trainer.step)
        else:
            trainer.initialize()
            logger.info("starting %s", directory)
        logger.info("%s", validate_fsdp_sharding(trainer.agent, sharding))
        if dry_run:
            trainer.compile(loader.sample_batch())
            logger.info("dry run: everything is ready, no step was made")
            return 0
        if is_primary():
            runs.warn_about_space(directory, trainer.arrays().num_bytes, rl_config.checkpoints.max_to_keep)
            runs.remove_summary(directory)
        trainer.train()
        _finish(trainer)
        return 0 if trainer.stopped_by is None else exit_code(trainer.stopped_by)


def _create_protocol(
    rl_config: RLTrainConfig, directory: pathlib.Path, loader: DataLoader, stack: contextlib.ExitStack
) -> EvaluationProtocol | None:
    """The config's environment, where there is one and something to do in it; it is closed with the stack."""
    if rl_config.env.id is None or not (rl_config.evaluation.num_episodes or rl_config.training.online_steps):
        return None
    if jax.process_count() > 1:
        if rl_config.training.online_steps:
            raise ConfigError(
                f"training.online_steps={rl_config.training.online_steps}: an online phase needs a single process "
                "(with any number of devices). Train offline on many hosts first, then online on one"
            )
        logger.warning("evaluation in %s needs a single process; use `acrlpd eval`", rl_config.env.id)
        return None
    protocol = EvaluationProtocol(
        rl_config,
        loader.dataset.norm_stats,
        reward_origin=loader.dataset.rewards.origin,
        directory=directory / EVALUATIONS,
    )
    stack.enter_context(protocol)
    warn_about_image_size(loader.dataset.source.features, protocol.envs.spec)
    return protocol


def warn_about_image_size(recorded: Mapping[str, Feature], spec: EnvSpec) -> None:
    """Says where the policy will see other pictures when it acts than in the data."""
    for camera in spec.cameras:
        found, wanted = spec.features[camera].shape[:2], recorded[camera].shape[:2]
        if found != wanted:
            logger.warning(
                "%s: environment %r renders %d x %d, the dataset has %d x %d: the policy will not see what it learned "
                "from. Set env.image_size to that of the dataset",
                camera,
                spec.name,
                *found,
                *wanted,
            )


def _create_online_phase(
    rl_config: RLTrainConfig,
    directory: pathlib.Path,
    loader: DataLoader,
    protocol: EvaluationProtocol | None,
) -> OnlinePhase | None:
    if not rl_config.training.online_steps:
        return None
    if protocol is None:
        raise ConfigError(
            f"training.online_steps={rl_config.training.online_steps} needs an environment: set env.id, or "
            "training.online_steps=0"
        )
    replay = open_replay(directory, rl_config, protocol.envs.spec)
    player: Player
    if rl_config.online.async_actor:
        player = ActorProcess(rl_config, directory, replay)
    else:
        rounds = RoundPlayer(rl_config, protocol.envs, replay, protocol.replan_steps)
        policy_of = functools.partial(protocol.policy, num_samples=acting_candidates(rl_config))
        player = SynchronousPlayer(rounds, replay, policy_of)
    return OnlinePhase(rl_config, loader, ReplayDataset(replay, rl_config, loader.dataset), player)


def _finish(trainer: Trainer) -> None:
    training = trainer.rl_config.training
    status = runs.FINISHED
    if trainer.stopped_by is not None:
        status = f"stopped by {signal.Signals(trainer.stopped_by).name}"
    elif trainer.step < training.offline_steps + training.online_steps:
        status = f"{runs.FINISHED} early: no improvement"
    if is_primary():
        plan = planned_costs(trainer.rl_config)
        runs.write_summary(trainer.directory, {"status": status, "plan": plan} | trainer.summary())
    logger.info("%s at step %d; checkpoint %s", status, trainer.step, trainer.directory / str(trainer.step))
    barrier("end of the run")


def read_assets(rl_config: RLTrainConfig) -> dict[str, bytes]:
    """The norm statistics as files for a checkpoint, by their path below assets/; none for fake data."""
    directory = norm_stats_dir(rl_config.data)
    asset_id = directory.relative_to(rl_config.data.assets_dir).as_posix()
    names = ("norm_stats.json", "norm_stats_origin.json")
    return {f"{asset_id}/{name}": (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def setup_logging() -> None:
    """Our own messages on stderr; on processes that do not log, only what went wrong."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every step it takes
    package = logging.getLogger("acrlpd")
    package.setLevel(logging.INFO if is_primary() else logging.WARNING)
    if not package.handlers:
        handler = _StderrHandler()
        prefix = f"[{jax.process_index()}] " if jax.process_count() > 1 else ""
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
        package.addHandler(handler)
        package.propagate = False


class _StderrHandler(logging.Handler):
    """Writes to whatever stderr is now: a progress bar puts itself in its place, below our lines."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)
