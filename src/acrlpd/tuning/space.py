"""What a study searches: keys of a config with their distributions, in stages.

The stages run one after the other, and each stage starts from the best values of the stages before it. A file without
stages is one stage:

    stages:
      learning_rates:
        pi0_lr: {low: 2.0e-4, high: 2.0e-2, log: true}
        critic_lr: {low: 1.0e-4, high: 1.0e-2, log: true}
      candidates:
        evaluation.best_of_n: [16, 32, 64]

    critic.num_critics: [2, 4]        # another file, which has no stages
"""

import dataclasses
import operator
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from acrlpd.agents.schedules.base import LRSchedule
from acrlpd.choice import kind_name
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, to_dict, validate_config
from acrlpd.config.overrides import Assignment
from acrlpd.config.tree import TYPE_KEY, families, field_types, flatten
from acrlpd.config.yaml_files import Setting, parse_assignments, settings_to_yaml
from acrlpd.files import is_plain_name
from acrlpd.tuning.distributions import Choices, Distribution, Range, create_choices, create_range

STAGES = "stages"
_ONLY_STAGE = "all"
_EXPECTED = "keys of a config with ranges or choices, or `stages:` with such keys"
# What a study itself decides: how long a trial is, how it is judged, where it lies.
_NOT_SEARCHED = (
    *("name", "exp_name", "seed", "training", "checkpoints", "logging"),
    *("evaluation.seed", "evaluation.num_episodes", "evaluation.baselines"),
)

_HEADER = (
    "What `acrlpd tune` searches: keys of the config with ranges ({low, high, log}) or lists of choices. The stages "
    "run one after the other; each stage starts from the best values of the stages before it.",
    "The config's own value must lie in each range, because the config itself is trial 0. The end of a learning-rate "
    "schedule moves in proportion to its peak.",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Keys that are searched together."""

    name: str
    distributions: Mapping[str, Distribution]  # by key, as written in the space


@dataclasses.dataclass(frozen=True)
class Space:
    """The stages in their order."""

    stages: tuple[Stage, ...]

    def to_yaml(self) -> str:
        """A space file; `parse_space` gives the same space back."""
        settings = {
            f"{STAGES}.{stage.name}.{key}": Setting(distribution.to_plain())
            for stage in self.stages
            for key, distribution in stage.distributions.items()
        }
        return settings_to_yaml(settings, _HEADER)


def load_space(path: pathlib.Path, config: RLTrainConfig) -> Space:
    """Reads a space file and refuses, all together, what does not fit the config."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the space {path} cannot be read: {error}") from error
    return parse_space(text, str(path), config)


def parse_space(text: str, file_name: str, config: RLTrainConfig) -> Space:
    """As `load_space`, from text; `file_name` appears in errors."""
    problems: list[str] = []
    stages: dict[str, dict[str, Distribution]] = {}
    seen: dict[str, str] = {}
    for stage, key, written in _entries(parse_assignments(text, file_name, _EXPECTED), problems):
        try:
            distribution = _create(key, written, config)
            path = Assignment(key, None).path
            if path in seen:
                raise ConfigError(f"{key} is given twice; the first place is {seen[path]}")
            seen[path] = written[0].where
            stages.setdefault(stage, {})[key] = distribution
        except ConfigError as error:
            problems += [written[0].error(line) for line in str(error).splitlines()]
    if not stages and not problems:
        problems.append(f"{file_name} searches nothing: it must hold {_EXPECTED}")
    if problems:
        raise ConfigError("this space cannot be searched:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return Space(tuple(Stage(name, keys) for name, keys in stages.items()))


def _entries(assignments: Sequence[Assignment], problems: list[str]) -> Iterator[tuple[str, str, list[Assignment]]]:
    """Stage, key, and what is written about the key: one list, or the fields of a range."""
    entries: dict[tuple[str, str], list[Assignment]] = {}
    has_stages = any(assignment.key.startswith(f"{STAGES}.") for assignment in assignments)
    for assignment in assignments:
        stage, key = _ONLY_STAGE, assignment.key
        if has_stages:
            first, _, rest = assignment.key.partition(".")
            stage, _, key = rest.partition(".")
            if first != STAGES or not key:
                problems.append(assignment.error(f"{assignment.key} stands outside of a stage; write it below one"))
                continue
            if not is_plain_name(stage):  # The directories of trials have the names of the stages.
                problems.append(assignment.error(f"{stage!r} is not a plain name for a stage"))
                continue
        if not isinstance(assignment.value, list):
            key, _, field = key.rpartition(".")
            if not key:
                found = f"{field}: {assignment.value!r}"
                problems.append(assignment.error(f"{found} is neither a range {{low, high}} nor a list of choices"))
                continue
            assignment = dataclasses.replace(assignment, key=field)
        entries.setdefault((stage, key), []).append(assignment)
    for (stage, key), written in entries.items():
        yield stage, key, written


def _create(key: str, written: Sequence[Assignment], config: RLTrainConfig) -> Distribution:
    """The distribution of one key, checked against the config."""
    path = Assignment(key, None).path
    own = read_value(config, key)
    if any(path == name or path.startswith(f"{name}.") for name in _NOT_SEARCHED):
        raise ConfigError(f"{key} is not searched: the study decides how long trials are and how they are judged")
    if isinstance(written[0].value, list):
        distribution: Distribution = create_choices(written[0].value)
    else:
        try:
            distribution = create_range({one.key: one.value for one in written}, _field_type(config, path))
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
    errors_before = validate_config(config).errors
    for value in distribution.extremes:
        changed = with_values(config, {key: value})
        found = [error for error in validate_config(changed).errors if error not in errors_before]
        if found:
            raise ConfigError(f"{key} {value!r}: {found[0]}")
    if own not in distribution:
        raise ConfigError(
            f"{key}: the config's own value {own!r} is not among {distribution.to_plain()}; trial 0 is the config "
            "itself, so widen the space or change the config"
        )
    return distribution


def read_value(config: RLTrainConfig, key: str) -> Any:
    """The config's own value of a key; a ConfigError names the nearest keys if there is no such key."""
    path = Assignment(key, None).path
    if path in families():
        return kind_name(operator.attrgetter(path)(config))
    values = dict(flatten(to_dict(config)))
    if path not in values or path.endswith(f".{TYPE_KEY}"):
        apply_config_overrides(config, {key: None})  # raises, and names the nearest key
        raise ConfigError(f"{key} cannot be searched")
    return values[path]


def _field_type(config: RLTrainConfig, path: str) -> Any:
    section, _, name = path.rpartition(".")
    holder: type = type(operator.attrgetter(section)(config) if section else config)
    return field_types(holder)[name]


def with_values(config: RLTrainConfig, values: Mapping[str, Any]) -> RLTrainConfig:
    """The config with values of a space. The end of a learning-rate schedule moves in proportion to its peak."""
    changes: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = Assignment(key, None).path.rpartition(".")
        schedule = operator.attrgetter(section)(config) if name == "peak_lr" else None
        if isinstance(schedule, LRSchedule) and isinstance(value, int | float):
            changes |= {f"{section}.{field}": moved for field, moved in schedule.scaled_to(value).items()}
        else:
            changes[key] = value
    return apply_config_overrides(config, changes)


def default_space(config: RLTrainConfig) -> Space:
    """Learning rates, then what the losses weigh, then N and the critics: around the values of the config."""
    values, acrlpd = dict(flatten(to_dict(config))), config.acrlpd
    has_critics = acrlpd.loss_weights.critic_weight > 0
    rates: dict[str, Distribution] = {"pi0_lr": _around(config.actor_lr_schedule.peak_lr, 8.0)}
    weights: dict[str, Distribution] = {}
    sizes: dict[str, Distribution] = {}
    if acrlpd.loss_weights.actor_weight > 0 and acrlpd.loss_weights.bc_weight > 0:
        weights["bc_weight"] = _around(acrlpd.loss_weights.bc_weight, 10.0)
    if has_critics:
        rates["critic_lr"] = _around(config.critic_lr_schedule.peak_lr, 8.0)
        weights["acrlpd.target_update_tau"] = _around(acrlpd.target_update_tau, 4.0, highest=1.0)
        if "backup.kappa" in values:
            weights["backup.kappa"] = Range(min(0.6, values["backup.kappa"]), max(0.97, values["backup.kappa"]))
        candidates = config.evaluation.best_of_n
        name = "acrlpd.num_action_samples" if candidates is None else "evaluation.best_of_n"
        sizes[name] = _sizes_around(acrlpd.num_action_samples if candidates is None else candidates)
        sizes["critic.num_critics"] = _sizes_around(config.critic.num_critics)
        sizes["critic.q_aggregation"] = _with(config.critic.q_aggregation, ("min", "mean"))
    stages = {"learning_rates": rates, "loss_weights": weights, "candidates_and_critics": sizes}
    return Space(tuple(Stage(name, keys) for name, keys in stages.items() if keys))


def _around(value: float, factor: float, highest: float = float("inf")) -> Range:
    """A range over orders of magnitude with the value in its middle; the ends have two digits."""
    return Range(float(f"{value / factor:.2g}"), min(float(f"{value * factor:.2g}"), highest), log=True)


def _sizes_around(value: int) -> Choices:
    return Choices(tuple(sorted({max(1, value // 2), value, 2 * value})))


def _with(value: Any, others: Sequence[Any]) -> Choices:
    return Choices(tuple(dict.fromkeys([*others, value])))
