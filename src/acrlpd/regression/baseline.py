"""What was measured of a scenario, the file that keeps this (the baseline), and whether a baseline can be compared."""

import dataclasses
import datetime
import json
import pathlib
import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, diff_configs
from acrlpd.cores import usable_cores
from acrlpd.files import read_json_object, write_text_atomically
from acrlpd.regression.scenario import Scenario

FORMAT = 1
_RECORD = "`acrlpd regress record --overwrite` makes a new baseline"


class BaselineError(ValueError):
    """There is no baseline, or it cannot be used."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where and with what a scenario was measured."""

    date: str
    acrlpd: str
    jax: str
    jaxlib: str
    python: str
    processor: str
    cores: int
    devices: str

    @property
    def machine(self) -> str:
        """What speed and memory depend on."""
        return f"{self.processor}, {self.cores} cores, {self.devices}"


@dataclasses.dataclass(frozen=True)
class Success:
    """Episodes of the last evaluation of a phase: one number for each seed."""

    successes: tuple[int, ...]
    episodes: tuple[int, ...]
    interval: tuple[float, float]  # 95 %, over all episodes


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Everything that is compared."""

    scenario: str
    seeds: tuple[int, ...]
    config: dict[str, Any]  # complete, as in config.yaml
    config_hash: str
    origin: Origin
    # Losses and similar metrics, with one value for each seed; None where a value was not finite. `early` is the first
    # line of metrics, which rounding has hardly changed, and `final` the last line.
    early: dict[str, tuple[float | None, ...]]
    final: dict[str, tuple[float | None, ...]]
    metric_names: tuple[str, ...]  # all that updates report
    success: dict[str, Success]  # by phase
    update_flops: float  # of one seed, counted in the program's own matrix products
    program_bytes: int  # state, inputs and working memory of the largest train step, by XLA's analysis
    num_compilations: int
    peak_host_bytes: int
    update_cost: tuple[float, ...]  # processor time of an update in workloads, for each stretch
    problems: tuple[str, ...]  # of the checkpoint's files and of the export


def describe_origin() -> Origin:
    return Origin(
        date=datetime.date.today().isoformat(),
        acrlpd=version("acrlpd"),
        jax=version("jax"),
        jaxlib=version("jaxlib"),
        python=platform.python_version(),
        processor=_processor(),
        cores=usable_cores(),
        devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    )


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def baseline_path(directory: pathlib.Path, scenario: str) -> pathlib.Path:
    return directory / f"{scenario}.json"


def write_baseline(path: pathlib.Path, measured: Measurement) -> None:
    """Writes the file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT} | dataclasses.asdict(measured)
    write_text_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_baseline(path: pathlib.Path) -> Measurement:
    record = f"`acrlpd regress record` makes a new one{' with --overwrite' if path.exists() else ''}"
    if not path.is_file():
        raise BaselineError(f"there is no baseline {path}: {record}")
    try:
        content = read_json_object(path)
    except ValueError as error:
        raise BaselineError(f"baseline {path} is damaged ({error}); take it from a backup, or {record}") from error
    found = content.pop("format", None)
    if found != FORMAT:
        raise BaselineError(
            f"baseline {path} has the format {found!r}, and this version of acrlpd reads the format {FORMAT}; {record}"
        )
    try:
        origin = Origin(**content.pop("origin"))
        success = {phase: Success(**_tuples(entry)) for phase, entry in content.pop("success").items()}
        early, final = _tuples(content.pop("early")), _tuples(content.pop("final"))
        return Measurement(**_tuples(content), origin=origin, success=success, early=early, final=final)
    except (TypeError, KeyError, AttributeError) as error:
        raise BaselineError(f"baseline {path} is damaged ({error}); take it from a backup, or {record}") from error


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def check_comparable(scenario: Scenario, baseline: Measurement) -> None:
    """Refuses a baseline of another scenario, other seeds, or with config fields that there are no longer."""
    if baseline.scenario != scenario.name:
        raise BaselineError(f"the baseline of {scenario.name} is one of {baseline.scenario!r}; {_RECORD}")
    if baseline.seeds != scenario.seeds:
        raise BaselineError(
            f"scenario {scenario.name} has the seeds {list(scenario.seeds)}, and its baseline those of "
            f"{list(baseline.seeds)}; {_RECORD}"
        )
    try:
        _read_config(baseline)
    except ConfigError as error:
        raise BaselineError(
            f"the config in the baseline of {scenario.name} is no longer accepted. Configs of users would not be, "
            f"either:\n{error}\nIf this is intended, {_RECORD}"
        ) from error


def find_differences(baseline: Measurement, now: Measurement) -> Iterator[str]:
    """In which conditions the baseline was made that are not those of now. They may explain a difference."""
    for name in ("acrlpd", "jax", "jaxlib", "python"):
        old, new = getattr(baseline.origin, name), getattr(now.origin, name)
        if old != new:
            yield f"the baseline was made with {name} {old}, now it is {new}"
    if baseline.origin.machine != now.origin.machine:
        yield (
            f"the baseline was made on another machine ({baseline.origin.machine}; now {now.origin.machine}): wider "
            "bounds for processor time and memory"
        )
    changes = diff_configs(_read_config(baseline), _read_config(now))
    if changes:
        shown = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())
        yield f"the baseline was made with another config: {shown}. If the change is intended, {_RECORD}"


def _read_config(measured: Measurement) -> RLTrainConfig:
    """The config of a measurement; fields that are newer than a baseline have their defaults."""
    return apply_config_overrides(RLTrainConfig(name=str(measured.config.get("name"))), measured.config)
