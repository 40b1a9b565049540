"""`acrlpd tune`: search for better settings of a config."""

import dataclasses
import importlib.util
import pathlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

from annotated_types import Ge, MinLen

from acrlpd.config.bounds import require_bounds
from acrlpd.config.command_line import parse_config_args
from acrlpd.config.tree import ConfigError
from acrlpd.config.validation import validate_config
from acrlpd.files import write_text_atomically
from acrlpd.installation import install_command
from acrlpd.text import print

_FEWEST_TRIALS = 2  # of a stage


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """Search for better settings of a config: trials of several seeds each, in stages, then a check on fresh seeds.

    The same command goes on after an interruption. The study lies beside the runs, in <exp_name>-tune.
    """

    # A YAML file that says what is searched. Default: learning rates, then loss weights, then N and critics.
    space: pathlib.Path | None = None
    # Write the space to this file and end, as a start for your own.
    write_space: pathlib.Path | None = None
    # Trials over all stages; the first one is the config itself.
    trials: Annotated[int, Ge(1)] = 40
    # Trials at a time. They share the cores and the memory of the devices.
    jobs: Annotated[int, Ge(1)] = 1
    # Seeds of each trial, trained together; the score is their mean.
    seeds: Annotated[tuple[int, ...], MinLen(1), Ge(0)] = (0, 1)
    # At most this many updates in a trial, offline first, then online. Default: those of the config.
    trial_steps: Annotated[int | None, Ge(1)] = None
    # Evaluations of a trial. At all but the last one, a trial below the median of the others ends.
    evaluations: Annotated[int, Ge(1)] = 3
    # Fresh seeds on which the winner is compared with the config itself at the end; 0: no comparison.
    final_seeds: Annotated[int, Ge(0)] = 4
    # At most this many updates in that comparison. Default: as in a trial.
    final_steps: Annotated[int | None, Ge(1)] = None


# Options that `acrlpd tune --help run` shows.
_RARE = ("write_space", "evaluations", "final_seeds", "final_steps")


def main(args: Sequence[str]) -> int:
    config, options = parse_config_args(TuneOptions, args, prog="acrlpd tune", rare=_RARE)
    require_bounds(options, "--")
    if importlib.util.find_spec("optuna") is None:
        raise ImportError(f"`acrlpd tune` needs the package optuna: {install_command('tune')}", name="optuna")
    import jax

    jax.config.update("jax_platforms", "cpu")  # The devices belong to the trials, which are other processes.
    from acrlpd.process import setup_logging
    from acrlpd.training.readiness import skip_online_phase
    from acrlpd.tuning.objective import choose_objective
    from acrlpd.tuning.space import default_space, load_space
    from acrlpd.tuning.study_files import StudySettings, split_evenly
    from acrlpd.tuning.trial import TrialStarter
    from acrlpd.tuning.tuner import run_study

    setup_logging()
    config, _ = skip_online_phase(config)
    validate_config(config).raise_for_errors()
    space = default_space(config) if options.space is None else load_space(options.space, config)
    if options.write_space is not None:
        return _write(options.write_space, space.to_yaml())
    if len(set(options.seeds)) < len(options.seeds):
        raise ConfigError(f"--seeds: a seed is given twice in {' '.join(map(str, options.seeds))}")
    if options.trials < _FEWEST_TRIALS * len(space.stages):
        raise ConfigError(
            f"--trials {options.trials} are too few for {len(space.stages)} stages, each of which needs at least "
            f"{_FEWEST_TRIALS}: give more trials, or a space with fewer stages"
        )
    settings = StudySettings(
        seeds=options.seeds,
        trial_steps=options.trial_steps,
        evaluations=options.evaluations,
        split=split_evenly(options.trials, len(space.stages)),
    )
    starter = TrialStarter(choose_objective(config), options.jobs)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        run_study(
            config,
            space,
            settings,
            starter,
            trials=options.trials,
            final_seeds=options.final_seeds,
            final_steps=options.final_steps,
        )
    except KeyboardInterrupt:
        print("acrlpd: interrupted; the same command goes on with this study", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _write(file: pathlib.Path, text: str) -> int:
    if file.exists():
        raise ConfigError(f"{file} exists: name another file with --write_space")
    write_text_atomically(file, text)
    print(f"wrote {file}: change it, and give it with --space {file}")
    return 0
