"""Runs in their directories: data, environment, weights or checkpoint, training, summary."""

import contextlib
import dataclasses
import logging
import pathlib
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import jax

from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.data import NORM_STATS_FILE, RewardConfig
from acrlpd.config.run import EnvConfig
from acrlpd.config.tree import config_hash, describe_changes
from acrlpd.data.pipeline.config_norm_stats import norm_stats_dir
from acrlpd.data.pipeline.held_out import read_held_out_windows
from acrlpd.data.pipeline.loader import DataLoader, create_data_loader
from acrlpd.data.pipeline.norm_stats import ORIGIN_FILE
from acrlpd.data.pipeline.replay import ReplayDataset
from acrlpd.data.sources.source import Feature
from acrlpd.envs.create import EnvPools
from acrlpd.envs.env import EnvSpec
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.evaluation.validation import Validator
from acrlpd.monitoring.profiling import parse_profile_steps
from acrlpd.runs import directory as runs
from acrlpd.runs.best_evaluation import describe_best
from acrlpd.training.checkpoints.metadata import check_resume, kept_episodes
from acrlpd.training.distributed import barrier, is_primary
from acrlpd.training.drive import Arena, EvalFn, compile_only, train
from acrlpd.training.going_back import find_resumed_checkpoint
from acrlpd.training.initial_weights import check_initial_weights
from acrlpd.training.learner import Learner
from acrlpd.training.online.actor import ActorProcess
from acrlpd.training.online.phase import OnlinePhase
from acrlpd.training.online.rounds import Player, RoundPlayer, SynchronousPlayer, open_replay
from acrlpd.training.options import RunOptions
from acrlpd.training.out_of_memory import OutOfMemoryError
from acrlpd.training.progress import ProgressBars, describe_outcome, planned_costs
from acrlpd.training.sharding import FSDPSharding, create_sharding, validate_fsdp_sharding
from acrlpd.training.stopping import StopRequest, exit_code
from acrlpd.training.trainer import Trainer

logger = logging.getLogger(__name__)


def train_runs(
    configs: Sequence[RLTrainConfig],
    directories: Sequence[pathlib.Path],
    options: RunOptions,
    *,
    eval_fn: EvalFn | None = None,
    offline_copies: Sequence[pathlib.Path] | None = None,
    env_pools: EnvPools | None = None,
) -> int:
    """Trains one run, or several runs of one shape in one program, each in its directory; returns the exit code.

    `eval_fn` judges an agent instead of the config's environment. `offline_copies` are the `offline_copy` of each
    trainer. `env_pools` outlive these runs; without them, the environments end with the runs.
    """
    sharding, stop = create_sharding(configs[0]), StopRequest()
    bars = ProgressBars(enabled=is_primary() and not options.dry_run)
    starts = [_check_start(config, directory, options) for config, directory in zip(configs, directories, strict=True)]
    with contextlib.ExitStack() as stack:
        written = _make_directories(configs, directories, options, stack)
        loaders = _create_loaders(configs, [start.kept for start in starts], sharding, stack)
        learner = Learner(sharding)
        env_pools = env_pools or stack.enter_context(EnvPools())
        arenas = [
            Arena(group, _create_protocol(configs[group[0]], loaders[group[0]], len(group), env_pools), eval_fn)
            for group in _runs_that_act_together(configs)
        ]
        trainers = []
        for run, config in enumerate(configs):
            [arena] = [arena for arena in arenas if run in arena.runs]
            trainer = Trainer(
                config,
                loaders[run],
                learner,
                written[run],
                run=run,
                stop=stop,
                bars=bars,
                assets=starts[run].assets,
                is_evaluated=eval_fn is not None or (arena.protocol is not None and config.evaluation.num_episodes > 0),
                validator=_create_validator(config, loaders[run], sharding),
                online=_create_online_phase(config, written[run], loaders[run], arena.protocol),
                offline_copy=None if offline_copies is None else offline_copies[run],
                profile_steps=parse_profile_steps(options.profile_steps),
            )
            stack.callback(trainer.close)
            _load(trainer, starts[run].checkpoint, directories[run])
            trainers.append(trainer)
        learner.share_policies(range(len(configs)) if options.allow_changed else _find_leaders(configs, loaders))
        state = validate_fsdp_sharding(trainers[0].agent, learner.sharding)
        logger.info("%s", state if len(trainers) == 1 else f"{len(trainers)} runs, each with {state}")
        if options.dry_run:
            compile_only(trainers)
            logger.info("dry run: everything is ready, no step was made")
            return 0
        if is_primary():
            needed, max_to_keep = len(configs) * state.total_bytes, configs[0].checkpoints.max_to_keep
            runs.warn_about_space(directories[0], needed, max_to_keep)
            for directory in directories:  # A resumed run has not ended, so reports must not show its earlier end.
                (directory / runs.SUMMARY_FILE).unlink(missing_ok=True)
        with _failures_told(trainers, options):
            train(trainers, arenas)
        for trainer in trainers:
            _write_summary(trainer)
        stopped_by = [trainer.stopped_by for trainer in trainers if trainer.stopped_by is not None]
        return exit_code(stopped_by[0]) if stopped_by else 0


def _make_directories(
    configs: Sequence[RLTrainConfig],
    directories: Sequence[pathlib.Path],
    options: RunOptions,
    stack: contextlib.ExitStack,
) -> list[pathlib.Path]:
    """The directories that the runs write to: those of the runs, or temporary ones in a dry run."""
    written = list(directories)
    if options.dry_run:
        temporary = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = [temporary / str(run) for run in range(len(configs))]
    for config, directory in zip(configs, written, strict=True):
        directory.mkdir(parents=True, exist_ok=True)
        if is_primary():
            runs.write_run_config(directory, config)
    return written


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where a run begins."""

    assets: dict[str, bytes]
    checkpoint: pathlib.Path | None = None  # to go on from
    kept: frozenset[int] | None = None  # the held-out episodes; None: they are chosen now


def _check_start(rl_config: RLTrainConfig, directory: pathlib.Path, options: RunOptions) -> _Start:
    """Refuses a run that cannot begin, before the data is read, which takes long."""
    assets = read_assets(rl_config)
    checkpoint = find_resumed_checkpoint(directory, options) if options.resume else None
    if checkpoint is None:
        check_initial_weights(rl_config)
        return _Start(assets)
    changes = check_resume(checkpoint, rl_config, assets, options.allow_changed)
    if changes:
        logger.warning("resuming with changes:\n%s", describe_changes(changes))
    return _Start(assets, checkpoint, kept_episodes(checkpoint, changes))


def _load(trainer: Trainer, checkpoint: pathlib.Path | None, directory: pathlib.Path) -> None:
    if checkpoint is None:
        trainer.initialize()
        logger.info("starting %s", directory)
    else:
        trainer.load_checkpoint(checkpoint)
        logger.info("resuming %s after step %d", directory, trainer.step)


def _create_loaders(
    configs: Sequence[RLTrainConfig],
    kept: Sequence[frozenset[int] | None],
    sharding: FSDPSharding,
    stack: contextlib.ExitStack,
) -> list[DataLoader]:
    loaders: list[DataLoader] = []
    for config, episodes in zip(configs, kept, strict=True):
        same = (loader for loader in loaders if loader.reads_data_of(config, episodes))
        like = next(same, loaders[0] if loaders else None)
        num_runs = len(configs)
        loader = create_data_loader(config, device_sharding=sharding.data, num_runs=num_runs, like=like, kept=episodes)
        loaders.append(stack.enter_context(loader))
    if len({loader.capacity for loader in loaders}) > 1:  # Feeds of rows have another capacity than feeds of batches.
        raise ConfigError(
            "the data of some runs fits on the devices, and that of other runs does not; runs that train together need "
            "data.on_device=never then"
        )
    return loaders


def _find_leaders(configs: Sequence[RLTrainConfig], loaders: Sequence[DataLoader]) -> list[int]:
    """For each run the first run with the same policy at every step.

    These runs differ only in their rewards and environments, and the windows of their batches are the same. Rewards do
    not reach a policy that only clones. Online, each run has the replay of its own environment.
    """

    def policy_hash(config: RLTrainConfig) -> str:
        data = dataclasses.replace(config.data, rewards=RewardConfig())
        return config_hash(dataclasses.replace(config, env=EnvConfig(), data=data))

    leaders: list[int] = []
    for run, config in enumerate(configs):
        is_alone = config.acrlpd.rewards_reach_policy or config.training.online_steps > 0
        same = [
            other
            for other in range(run)
            if policy_hash(configs[other]) == policy_hash(config) and loaders[other].draws_windows_of(loaders[run])
        ]
        leaders.append(same[0] if same and not is_alone else run)
    return leaders


def _runs_that_act_together(configs: Sequence[RLTrainConfig]) -> list[tuple[int, ...]]:
    """The numbers of the runs, grouped: runs that differ only in their seed act with the same transforms."""
    groups: dict[str, list[int]] = {}
    for run, config in enumerate(configs):
        groups.setdefault(config_hash(dataclasses.replace(config, seed=0)), []).append(run)
    return [tuple(group) for group in groups.values()]


def read_assets(rl_config: RLTrainConfig) -> dict[str, bytes]:
    """What a policy needs beside its weights as files for a checkpoint, by their path below assets/.

    These are the norm statistics, which fake data does not have, and the files of the policy family.
    """
    directory = norm_stats_dir(rl_config.data)
    asset_id = directory.relative_to(rl_config.data.assets_dir).as_posix()
    names = (NORM_STATS_FILE, ORIGIN_FILE)
    found = {f"{asset_id}/{name}": (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    return found | rl_config.model.asset_files()


def _create_protocol(
    rl_config: RLTrainConfig, loader: DataLoader, num_runs: int, env_pools: EnvPools
) -> EvaluationProtocol | None:
    """The config's environment, if its runs evaluate or act in one."""
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
        num_runs=num_runs,
        envs=env_pools.get(rl_config, num_runs=num_runs),
    )
    warn_about_image_size(loader.dataset.source.features, protocol.envs.spec)
    return protocol


def _create_validator(rl_config: RLTrainConfig, loader: DataLoader, sharding: FSDPSharding) -> Validator | None:
    """What judges the agent by the held-out episodes, if the data has any."""
    windows = read_held_out_windows(loader.dataset, rl_config)
    return None if windows is None else Validator(rl_config, windows, loader.dataset.norm_stats, sharding.data)


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


@contextlib.contextmanager
def _failures_told(trainers: Sequence[Trainer], options: RunOptions) -> Iterator[None]:
    """Alerts those whom the configs name when the runs fail, unless they are about to be tried again."""
    try:
        yield
    except Exception as error:
        tried_again = isinstance(error, OutOfMemoryError) and options.auto_batch and error.next_accumulation is not None
        for trainer in () if tried_again else trainers:
            reason = str(error).partition("\n")[0]
            trainer.monitor.on_end("failed", trainer.step, f"step {trainer.step:,}: {type(error).__name__}: {reason}")
        raise


def end_status(trainer: Trainer) -> str:
    """How a run has ended, in words."""
    if trainer.stopped_by is not None:
        return f"stopped by {signal.Signals(trainer.stopped_by).name}"
    if trainer.step < trainer.rl_config.num_train_steps:
        return f"{runs.FINISHED} early: no improvement"
    return runs.FINISHED


def _write_summary(trainer: Trainer) -> None:
    status = end_status(trainer)
    if is_primary():
        plan = planned_costs(trainer.rl_config)
        runs.write_summary(trainer.directory, {"status": status, "plan": plan} | trainer.summary())
    reached = describe_outcome(trainer.evaluations.phases.get(trainer.phase))
    if trainer.evaluations.best is not None:
        reached.append(f"best {describe_best(trainer.evaluations.best)}")
    place = trainer.directory / str(trainer.step)
    text = "; ".join([f"{status} at step {trainer.step:,}", *reached, f"checkpoint {place}"])
    logger.info("%s", text)
    trainer.monitor.on_end("finished" if trainer.stopped_by is None else "stopped", trainer.step, text)
    barrier("end of the run")
