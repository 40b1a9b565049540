"""`acrlpd train`: refuse what cannot work or takes too long, say what the run takes, then train."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

from acrlpd.config.command_line import Flag, parse_config_args
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.plan.accelerators import claim_device_memory
from acrlpd.config.plan.plan import LONGEST_RUN_S, Plan, plan_here
from acrlpd.config.registry import get_config, list_configs
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError
from acrlpd.files import is_whole_number
from acrlpd.runs.starting_point import find_starting_point
from acrlpd.text import print
from acrlpd.training.distributed import (
    DistributedOptions,
    expect_abort,
    initialize_distributed,
    is_primary,
    peer_error,
)
from acrlpd.training.options import RunOptions


@dataclasses.dataclass(frozen=True)
class PlanLimits:
    """What the plan of a run may refuse. The comments are the help of the commands that train."""

    # Train even if the plan says that the run does not fit into memory.
    ignore_plan: Flag = False
    # Train even if the plan says that the run takes longer than a week.
    allow_long: Flag = False


# The help shows the options of the last base first, because dataclasses take the fields in this order.
@dataclasses.dataclass(frozen=True)
class TrainOptions(PlanLimits, DistributedOptions, RunOptions):
    """Train a policy with RL on action chunks: offline on a dataset, then online."""

    # Show the whole plan before training, not only its summary.
    show_plan: Flag = False
    # Let all devices of a machine share one copy of the large arrays, unless fsdp.fsdp_devices names a number above 1.
    enable_fsdp: Flag = False
    # The run that is resumed may have had other learning rates and other loss weights.
    override_lr_schedule: Flag = False


# Options that `acrlpd train --help run` shows.
_RARE = (
    *("tasks", "branch_from", "auto_batch", "allow_changed", "profile_steps", "ignore_plan"),
    *("enable_fsdp", "override_lr_schedule"),
    *(field.name for field in dataclasses.fields(DistributedOptions)),
)
# What `--override_lr_schedule` adds to `--allow_changed`.
_OVERRIDDEN = ("actor_lr_schedule", "critic_lr_schedule", "acrlpd.loss_weights")


def main(args: Sequence[str]) -> int:
    args, stored = _find_stored_config(args)
    config, options = parse_config_args(TrainOptions, args, prog="acrlpd train", rare=_RARE, stored=stored)
    if options.resume and options.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other; give one")
    if options.resume and options.branch_from is not None:
        raise ConfigError(
            "--resume and --branch_from contradict each other: a branch that has begun is a run of its own, which "
            "--resume DIR continues"
        )
    if options.branch_from is not None and any(arg.partition("=")[0] == "--load" for arg in args):
        raise ConfigError("--load and --branch_from contradict each other: a branch takes policy and critics along")
    if options.override_lr_schedule:
        options = dataclasses.replace(options, allow_changed=(*options.allow_changed, *_OVERRIDDEN))
    claim_device_memory()
    from acrlpd.monitoring.profiling import parse_profile_steps
    from acrlpd.runs.directory import run_directory
    from acrlpd.training.demonstrations import collect_missing_demonstrations
    from acrlpd.training.experiment import run_experiment
    from acrlpd.training.going_back import locate_resume
    from acrlpd.training.members import create_members

    parse_profile_steps(options.profile_steps)  # Steps that make no sense are refused before anything starts.
    try:
        initialize_distributed(options)
        config = adapt(config, options)
        members = create_members(config, options)
        # A --resume that contradicts the config is refused before demonstrations are collected, which takes minutes.
        locate_resume(options, [run_directory(member) for member in members])
        for member in members:
            collect_missing_demonstrations(member, dry_run=options.dry_run)
        check(members, options)
        return run_experiment(config, options)
    except BaseException as error:  # Ctrl-C too
        if (lost := peer_error(error)) is not None:  # This process is not at fault: a message, no traceback.
            raise ConnectionError(str(lost)) from error
        expect_abort()
        raise


def _find_stored_config(args: Sequence[str]) -> tuple[Sequence[str], RLTrainConfig | None]:
    """The config of the run that --resume or --branch_from names by its directory; None if there is no such run.

    The first result is the arguments, for --resume without a --config that names the preset of the run.
    """
    for arg, following in itertools.pairwise([*args, "--"]):
        flag, equals, value = arg.partition("=")
        path = value if equals else following
        if path.startswith("--"):
            continue
        if flag == "--resume" and not is_whole_number(path):
            stored = find_starting_point(path, flag).config_in_place()
            return _without_preset(args, stored.name), stored
        if flag in ("--branch_from", "--branch-from"):
            return args, find_starting_point(path, flag).stored_config()
    return args, None


def _without_preset(args: Sequence[str], own: str) -> Sequence[str]:
    """The arguments without a --config that names the preset `own`, or an alias: the config of a run says more.

    The --environment goes as well, because it chooses among the stages of a preset.
    """
    name, rest = _take_out("--config", args)
    if name in list_configs() and get_config(name).name == own:
        return _take_out("--environment", rest)[1]
    return args


def _take_out(flag: str, args: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The value of a flag, which is empty where the flag is not given, and the arguments without the flag."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == flag:
            after = index + 1 if equals else index + 2
            return value or "".join(args[index + 1 : after]), [*args[:index], *args[after:]]
    return "", args


def adapt(config: RLTrainConfig, options: TrainOptions) -> RLTrainConfig:
    """The config for the devices and the environment that there are."""
    import jax

    from acrlpd.training.readiness import skip_online_phase

    if options.enable_fsdp and config.fsdp.fsdp_devices == 1:
        config = apply_config_overrides(config, fsdp_devices=jax.local_device_count())
    config, warning = skip_online_phase(config)
    if warning is not None and is_primary():
        print(f"warning: {warning}", file=sys.stderr)
    return config


def check(members: Sequence[RLTrainConfig], options: TrainOptions) -> None:
    """Checks everything that can be known before a compile: the configs, the files, the memory, the time.

    All that is wrong with configs and files is in one error. The plan is that of the first run; several runs share the
    memory of the devices.
    """
    import jax

    from acrlpd.cli.plan import print_plan
    from acrlpd.training.readiness import require_ready

    goes_on = bool(options.resume) or options.branch_from is not None
    warnings = require_ready(members, resume=goes_on)
    for warning in warnings if is_primary() else ():
        print(f"warning: {warning}", file=sys.stderr)
    plan = plan_here(members[0], jax.device_count(), num_runs=len(members))
    if is_primary() and len(members) > 1:
        print(f"{len(members)} runs train together; the plan is that of one run, with its share of the memory")
    if is_primary() and (options.show_plan or not plan.fits):
        print_plan(plan)
    refuse(plan, options, num_runs=len(members))  # The error says what the lines below would say.
    if is_primary():
        print(f"plan: {plan.summary}" if plan.fits else plan.verdict)


def refuse(plan: Plan, options: PlanLimits, *, num_runs: int = 1) -> None:
    """Refuses a run that does not fit or takes too long by its plan, unless the options allow it."""
    if not plan.fits and not options.ignore_plan:
        fewer = "" if num_runs == 1 else "\nOr train fewer runs at a time: each then has more memory"
        raise ConfigError(f"{plan.verdict}{fewer}\n--ignore_plan trains all the same")
    if plan.is_too_long and plan.step_seconds is not None and not options.allow_long:
        most = int(LONGEST_RUN_S / plan.step_seconds)
        raise ConfigError(
            f"too long: {plan.summary}. A run may take a week.\nMake fewer updates (--max_steps {most} takes a week), "
            "cheaper ones (--best_of_n_samples, --batch_size) or use more devices\n--allow_long trains all the same"
        )
