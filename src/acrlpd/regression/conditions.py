"""Whether a baseline can be compared with what runs now, and in which conditions both differ."""

from collections.abc import Iterator

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, diff_configs
from acrlpd.regression.baseline import BaselineError, Measurement
from acrlpd.regression.scenario import Scenario

_RECORD = "`acrlpd regress record --overwrite` makes a new baseline"


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
