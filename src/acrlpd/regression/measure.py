"""Trains a scenario and measures the training. `apart` does this in a process of its own."""

import contextlib
import logging
import math
import pathlib
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence

import jax
import jax.monitoring

from acrlpd.config import RLTrainConfig, apply_config_overrides, config_hash, to_dict
from acrlpd.config.plan.flops import step_flops
from acrlpd.envs.create import EnvPools
from acrlpd.evaluation.statistics import wilson_interval
from acrlpd.process import keep_freed_memory, setup_logging
from acrlpd.regression.baseline import Measurement, Success, describe_origin
from acrlpd.regression.scenario import Scenario
from acrlpd.regression.update_cost import measure_update_cost
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.runs.metrics_log import EVALUATION, ONLINE, VALIDATION
from acrlpd.runs.record import RunRecord, read_run
from acrlpd.serving.export import export_policy
from acrlpd.training.demonstrations import collect_missing_demonstrations
from acrlpd.training.members import create_members
from acrlpd.training.options import RunOptions
from acrlpd.training.readiness import require_ready
from acrlpd.training.sharding import compiled_programs
from acrlpd.training.train_runs import train_runs
from acrlpd.training.verification import parts_to_verify

_COMPILED = "/jax/core/compile/backend_compile_duration"
# Metrics that are compared. Where an update does not report one of them, there is nothing to compare.
_COMPARED = (
    *("critic_loss", "bc_loss", "actor_loss", "backup_loss", "judge_loss", "q_mean"),
    *("policy_grad_norm", "critic_grad_norm"),
)
# Which metrics an evaluation reports depends on what it finds.
_EVENTS = (EVALUATION, VALIDATION, ONLINE)


class MeasurementError(ValueError):
    """A scenario did not come to its end."""


def measure(scenario: Scenario) -> Measurement:
    """Trains the seeds of the scenario one after the other in a temporary directory.

    The runs share their compiled programs. The programs are not taken from the cache on disk, because a process that
    compiles has another peak of memory than a process that does not.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    setup_logging()
    # Each seed would report its progress, and anomalies: a policy that trains so shortly has many.
    logging.getLogger("acrlpd").setLevel(logging.ERROR)
    keep_freed_memory()
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="acrlpd-regress-") as temporary:
        directory = pathlib.Path(temporary)
        members = create_members(_place(scenario, directory), RunOptions(seeds=scenario.seeds))
        directories = [directory / "runs" / member.exp_name for member in members]
        collect_missing_demonstrations(members[0])
        require_ready(members, resume=False)
        with _count_compilations() as compilations, EnvPools() as env_pools:
            for member, path in zip(members, directories, strict=True):
                if code := train_runs([member], [path], RunOptions(), env_pools=env_pools):
                    raise MeasurementError(f"scenario {scenario.name}: stopped by the signal {code - 128}")
        peak_host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        records = [read_run(path) for path in directories]
        problems = list(_file_problems(directories[0]))
        try:  # The export is loaded again, and its actions are compared with those of the checkpoint.
            export_policy(directories[0], directory / "export", critics="all")
        except CheckpointError as error:
            problems.append(f"export: {error}")
        update_flops = step_flops(members[0]).total * members[0].batch_size
        return Measurement(
            scenario=scenario.name,
            seeds=scenario.seeds,
            config=to_dict(scenario.config),
            config_hash=config_hash(scenario.config),
            origin=describe_origin(),
            early=_values(records, 0),
            final=_values(records, -1),
            metric_names=tuple(name for name in sorted(records[0].series) if not name.startswith(_EVENTS)),
            success=_successes(records),
            update_flops=update_flops,
            program_bytes=max(map(_program_bytes, compiled_programs())),
            num_compilations=len(compilations),
            peak_host_bytes=peak_host_bytes,
            update_cost=tuple(measure_update_cost(members[0], directory / "timed", update_flops)),
            problems=tuple(problem.replace(temporary, "...") for problem in problems),
        )


def _place(scenario: Scenario, directory: pathlib.Path) -> RLTrainConfig:
    """The config with all that the run writes, its demonstrations included, below the directory."""
    changes = {"exp_name": scenario.name, "checkpoints.directory": str(directory / "runs"), "evaluation.baselines": ()}
    if scenario.config.data.demonstrations.num_episodes:
        changes |= {"data.data_dir": str(directory / "demonstrations"), "data.assets_dir": str(directory / "assets")}
    return apply_config_overrides(scenario.config, changes)


@contextlib.contextmanager
def _count_compilations() -> Iterator[list[str]]:
    """The names of the programs that JAX compiles meanwhile."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == _COMPILED:
            compiled.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _values(records: Sequence[RunRecord], line: int) -> dict[str, tuple[float | None, ...]]:
    """The compared metrics of one line, with a value for each run; None where a value is not finite."""
    return {
        name: tuple(_finite(record.series[name].values[line]) for record in records)
        for name in _COMPARED
        if name in records[0].series
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _successes(records: Sequence[RunRecord]) -> dict[str, Success]:
    found: dict[str, Success] = {}
    for phase in records[0].stages:
        outcomes = [record.stages[phase] for record in records]
        episodes = tuple(outcome.episodes for outcome in outcomes)
        successes = tuple(round(outcome.success_rate * outcome.episodes) for outcome in outcomes)
        found[phase] = Success(successes, episodes, wilson_interval(sum(successes), sum(episodes)))
    return found


def _program_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes)


def _file_problems(directory: pathlib.Path) -> Iterator[str]:
    """What `acrlpd runs verify` finds."""
    for part in parts_to_verify(directory):
        yield from (f"{part.name}: {problem}" for problem in part.problems(lambda _: None))
