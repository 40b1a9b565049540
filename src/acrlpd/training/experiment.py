"""One run from config to summary: directory, devices, data, weights or checkpoint, training."""

import contextlib
import logging
import os
import pathlib
import platform
import signal
import sys
import tempfile
import zlib
from collections.abc import Sequence

import jax

from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.data.dataset import norm_stats_dir
from acrlpd.data.loader import create_acrlpd_data_loader
from acrlpd.data.norm_stats import load_norm_stats
from acrlpd.training import run_directory as runs
from acrlpd.training.checkpoint_metadata import check_resume
from acrlpd.training.distributed import barrier, is_primary
from acrlpd.training.out_of_memory import OutOfMemoryError
from acrlpd.training.sharding import create_fsdp_sharding_strategy, validate_fsdp_sharding
from acrlpd.training.signals import exit_code
from acrlpd.training.trainer import ACRLPDTrainer, EvalFn

logger = logging.getLogger(__name__)

EVALUATIONS = "evaluations"


def run_training_experiment(
    rl_config: RLTrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    auto_batch: bool = False,
    allow_changed: Sequence[str] = (),
    eval_fn: EvalFn | None = None,
) -> int:
    """Trains as the config says; returns the exit code: 0, or 128 + the signal that ended it.

    `dry_run` does everything but the steps and leaves no trace; `auto_batch` answers a first step that
    does not fit with more micro-batches; `allow_changed` names fields that may differ from the run that
    is resumed.
    """
    setup_logging()
    enable_compilation_cache()
    directory = runs.run_directory(rl_config)
    if is_primary() and not dry_run:
        runs.prepare_run_directory(directory, resume=resume, overwrite=overwrite)
    barrier("run directory")
    if rl_config.training.online_steps and is_primary():
        logger.warning(
            "training.online_steps=%d: this version trains offline only and ends after %d steps",
            rl_config.training.online_steps,
            rl_config.training.offline_steps,
        )
    while True:
        try:
            return _run(rl_config, directory, resume, dry_run, allow_changed, eval_fn)
        except OutOfMemoryError as error:
            steps = error.next_accumulation
            if not auto_batch or steps is None:
                raise
            logger.warning("%s\n--auto_batch: trying gradient_accumulation_steps=%d", error, steps)
            rl_config = apply_config_overrides(rl_config, gradient_accumulation_steps=steps)


def _run(
    rl_config: RLTrainConfig,
    directory: pathlib.Path,
    resume: bool,
    dry_run: bool,
    allow_changed: Sequence[str],
    eval_fn: EvalFn | None,
) -> int:
    sharding = create_fsdp_sharding_strategy(rl_config)
    assets = read_assets(rl_config)
    steps = runs.saved_steps(directory) if resume else []
    if steps:
        compatibility = check_resume(directory / str(steps[-1]), rl_config, assets, allow_changed)
        if compatibility.changed:
            logger.warning("resuming with changes:\n%s", compatibility.describe(compatibility.changed))
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(create_acrlpd_data_loader(rl_config, device_sharding=sharding.data))
        if eval_fn is None:
            eval_fn = _create_eval_fn(rl_config, directory, stack)
        # A dry run leaves no trace.
        written = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) if dry_run else directory
        trainer = ACRLPDTrainer(rl_config, loader, sharding, written, assets=assets, eval_fn=eval_fn)
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
            runs.write_run_config(directory, rl_config)
            runs.warn_about_space(directory, trainer.arrays().num_bytes, rl_config.checkpoints.max_to_keep)
        trainer.train()
        _finish(trainer)
        return 0 if trainer.stopped_by is None else exit_code(trainer.stopped_by)


def _create_eval_fn(rl_config: RLTrainConfig, directory: pathlib.Path, stack: contextlib.ExitStack) -> EvalFn | None:
    """Evaluation in the config's environment, where there is one; it is closed with the stack."""
    if rl_config.env.id is None or not rl_config.training.eval_frequency:
        return None
    if jax.process_count() > 1:
        logger.warning("evaluation in %s needs a single process; use `acrlpd eval`", rl_config.env.id)
        return None
    from acrlpd.evaluation.protocol import ACRLPDEvaluationProtocol

    norm_stats = load_norm_stats(norm_stats_dir(rl_config.data)) if read_assets(rl_config) else None
    protocol = ACRLPDEvaluationProtocol(rl_config, norm_stats, directory=directory / EVALUATIONS)
    return stack.enter_context(protocol).run_comprehensive_evaluation


def _finish(trainer: ACRLPDTrainer) -> None:
    status = "finished"
    if trainer.stopped_by is not None:
        status = f"stopped by {signal.Signals(trainer.stopped_by).name}"
    elif trainer.step < trainer.rl_config.training.offline_steps:
        status = "ended early: no improvement"
    if is_primary():
        runs.write_summary(trainer.directory, {"status": status} | trainer.summary())
    logger.info("%s at step %d; checkpoint %s", status, trainer.step, trainer.directory / str(trainer.step))
    barrier("end of the run")


def read_assets(rl_config: RLTrainConfig) -> dict[str, bytes]:
    """The norm statistics as files for a checkpoint, by their path below assets/; none for fake data."""
    directory = norm_stats_dir(rl_config.data)
    asset_id = directory.relative_to(rl_config.data.assets_dir).as_posix()
    names = ("norm_stats.json", "norm_stats_origin.json")
    return {f"{asset_id}/{name}": (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, so that a restart does not compile again."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache / "acrlpd" / "xla" / _processor_name()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _processor_name() -> str:
    """Programs are compiled for the processor at hand; a home directory may be shared by several kinds."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return f"{platform.machine()}-{zlib.crc32(flags.encode()):08x}"


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
