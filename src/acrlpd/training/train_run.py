"""One run in one directory: data, environment, weights or checkpoint, training, summary."""

import contextlib
import logging
import pathlib
import signal
import tempfile
from collections.abc import Mapping

import jax

from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.data.pipeline.dataset import norm_stats_dir
from acrlpd.data.pipeline.loader import DataLoader, create_data_loader
from acrlpd.data.pipeline.norm_stats import ORIGIN_FILE
from acrlpd.data.pipeline.replay import ReplayDataset
from acrlpd.data.sources.source import Feature
from acrlpd.envs.env import EnvSpec
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.monitoring.profiling import parse_profile_steps
from acrlpd.runs import directory as runs
from acrlpd.runs.record import EVALUATIONS
from acrlpd.training.checkpoints.metadata import check_resume, describe_changes
from acrlpd.training.distributed import barrier, is_primary
from acrlpd.training.initial_weights import check_initial_weights
from acrlpd.training.online.actor import ActorProcess
from acrlpd.training.online.rounds import OnlinePhase, Player, RoundPlayer, SynchronousPlayer, open_replay
from acrlpd.training.options import RunOptions
from acrlpd.training.progress import planned_costs
from acrlpd.training.sharding import create_sharding, validate_fsdp_sharding
from acrlpd.training.stopping import exit_code
from acrlpd.training.trainer import EvalFn, Trainer

logger = logging.getLogger(__name__)


def train_run(
    rl_config: RLTrainConfig,
    directory: pathlib.Path,
    options: RunOptions,
    *,
    eval_fn: EvalFn | None = None,
    offline_copy: pathlib.Path | None = None,
) -> int:
    """Trains in `directory`; returns the exit code. `eval_fn` and `offline_copy` are those of `Trainer`."""
    sharding, assets = create_sharding(rl_config), read_assets(rl_config)
    steps = runs.saved_steps(directory) if options.resume else []
    if steps:
        changes = check_resume(directory / str(steps[-1]), rl_config, assets, options.allow_changed)
        if changes:
            logger.warning("resuming with changes:\n%s", describe_changes(changes))
    else:
        check_initial_weights(rl_config)
    with contextlib.ExitStack() as stack:
        # A dry run writes into a temporary directory.
        written = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) if options.dry_run else directory
        written.mkdir(parents=True, exist_ok=True)
        if is_primary():
            runs.write_run_config(written, rl_config)
        loader = stack.enter_context(create_data_loader(rl_config, device_sharding=sharding.data))
        protocol = _create_protocol(rl_config, loader, stack)
        if eval_fn is None and protocol is not None and rl_config.evaluation.num_episodes:
            eval_fn = _create_eval_fn(protocol, written / EVALUATIONS)
        trainer = Trainer(
            rl_config,
            loader,
            sharding,
            written,
            assets=assets,
            eval_fn=eval_fn,
            online=_create_online_phase(rl_config, written, loader, protocol),
            offline_copy=offline_copy,
            profile_steps=parse_profile_steps(options.profile_steps),
        )
        stack.callback(trainer.close)
        if steps:
            trainer.load_checkpoint(directory / str(steps[-1]))
            logger.info("resuming %s after step %d", directory, trainer.step)
        else:
            trainer.initialize()
            logger.info("starting %s", directory)
        state = validate_fsdp_sharding(trainer.agent, sharding)
        logger.info("%s", state)
        if options.dry_run:
            trainer.compile(loader.sample_feed(1))
            logger.info("dry run: everything is ready, no step was made")
            return 0
        if is_primary():
            runs.warn_about_space(directory, state.total_bytes, rl_config.checkpoints.max_to_keep)
            # A resumed run has not ended, so reports must not show its earlier end.
            (directory / runs.SUMMARY_FILE).unlink(missing_ok=True)
        trainer.train()
        _write_summary(trainer)
        return 0 if trainer.stopped_by is None else exit_code(trainer.stopped_by)


def read_assets(rl_config: RLTrainConfig) -> dict[str, bytes]:
    """The norm statistics as files for a checkpoint, by their path below assets/; fake data has no such files."""
    directory = norm_stats_dir(rl_config.data)
    asset_id = directory.relative_to(rl_config.data.assets_dir).as_posix()
    names = (NORM_STATS_FILE, ORIGIN_FILE)
    return {f"{asset_id}/{name}": (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def _create_protocol(
    rl_config: RLTrainConfig, loader: DataLoader, stack: contextlib.ExitStack
) -> EvaluationProtocol | None:
    """The config's environment, if the run evaluates or acts in one; the stack closes it."""
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
    protocol = EvaluationProtocol(rl_config, loader.dataset.norm_stats, reward_origin=loader.dataset.rewards.origin)
    stack.enter_context(protocol)
    warn_about_image_size(loader.dataset.source.features, protocol.envs.spec)
    return protocol


def _create_eval_fn(protocol: EvaluationProtocol, directory: pathlib.Path) -> EvalFn:
    return lambda agent, step: protocol.evaluate_at_step({0: agent}, step, {0: directory})[0]


def warn_about_image_size(recorded: Mapping[str, Feature], spec: EnvSpec) -> None:
    """Warns if the environment renders images of another size than the dataset has."""
    for camera in spec.cameras:
        found, wanted = spec.features[camera].shape[:2], recorded[camera].shape[:2]
        if found != wanted:
            logger.warning(
                "%s: environment %r renders %d x %d, the dataset has %d x %d: the policy will not see what it learned "
                "from. Set env.image_size to the size in the dataset",
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
    assert protocol is not None  # the checks of a config refuse online steps without an environment
    replay = open_replay(directory, rl_config, protocol.envs.spec)
    player: Player
    if rl_config.online.async_actor:
        player = ActorProcess(rl_config, directory, replay)
    else:
        rounds = RoundPlayer(rl_config, protocol.envs, replay)
        player = SynchronousPlayer(rl_config, rounds, loader.dataset.norm_stats)
    return OnlinePhase(rl_config, loader, ReplayDataset(replay, rl_config, loader.dataset), player)


def _write_summary(trainer: Trainer) -> None:
    status = runs.FINISHED
    if trainer.stopped_by is not None:
        status = f"stopped by {signal.Signals(trainer.stopped_by).name}"
    elif trainer.step < trainer.rl_config.num_train_steps:
        status = f"{runs.FINISHED} early: no improvement"
    if is_primary():
        plan = planned_costs(trainer.rl_config)
        runs.write_summary(trainer.directory, {"status": status, "plan": plan} | trainer.summary())
    logger.info("%s at step %d; checkpoint %s", status, trainer.step, trainer.directory / str(trainer.step))
    barrier("end of the run")
