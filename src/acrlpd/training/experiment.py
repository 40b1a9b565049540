"""`run_experiment`: a run, or a run and what it is compared with, from a config to a report."""

import contextlib
import logging
import pathlib

from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.monitoring.report import generate_training_report
from acrlpd.process import enable_compilation_cache, keep_freed_memory, setup_logging
from acrlpd.runs import directory as runs
from acrlpd.runs.record import RunError
from acrlpd.training.comparison import run_comparison
from acrlpd.training.distributed import barrier, is_primary
from acrlpd.training.options import RunOptions
from acrlpd.training.out_of_memory import OutOfMemoryError
from acrlpd.training.train_run import train_run
from acrlpd.training.trainer import EvalFn

logger = logging.getLogger(__name__)


def run_experiment(rl_config: RLTrainConfig, options: RunOptions, eval_fn: EvalFn | None = None) -> int:
    """Trains as the config says; returns the exit code: 0, or 128 + the signal that ended the run.

    A dry run does everything but the steps and leaves no trace.
    """
    setup_logging()
    enable_compilation_cache()
    keep_freed_memory()
    directory = runs.run_directory(rl_config)
    with contextlib.ExitStack() as stack:
        if is_primary() and not options.dry_run:
            runs.prepare_run_directory(directory, resume=options.resume, overwrite=options.overwrite)
            stack.enter_context(runs.only_trainer(directory))
        barrier("run directory")
        while True:
            try:
                if rl_config.evaluation.baselines and not options.dry_run:
                    code = run_comparison(rl_config, directory, options)
                else:
                    code = train_run(rl_config, directory, options, eval_fn=eval_fn)
                break
            except OutOfMemoryError as error:
                steps = error.next_accumulation
                if not options.auto_batch or steps is None:
                    raise
                logger.warning("%s\n--auto_batch: trying gradient_accumulation_steps=%d", error, steps)
                rl_config = apply_config_overrides(rl_config, gradient_accumulation_steps=steps)
        if code == 0 and is_primary() and not options.dry_run:
            write_report(directory)
    return code


def write_report(directory: pathlib.Path) -> None:
    """Writes the report of a run that has ended. A report that cannot be written does not make the run a failure."""
    try:
        logger.info("report %s", generate_training_report([directory]))
    except (OSError, RunError) as error:
        logger.error("the report could not be written (%s); `acrlpd report %s` tries again", error, directory)
