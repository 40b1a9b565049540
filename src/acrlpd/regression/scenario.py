"""What a scenario is: a config with changes, and the seeds that it is trained with. One YAML file each."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import yaml
from annotated_types import MinLen

from acrlpd.choice import hint
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.config.bounds import require_bounds
from acrlpd.config.command_line import find_config
from acrlpd.config.run import SEEDS
from acrlpd.config.yaml_files import ConfigLoader
from acrlpd.files import is_plain_name

SHIPPED = pathlib.Path(__file__).parent / "scenarios"
_SUFFIX = ".yaml"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training that is repeated to see whether something has changed."""

    # The name of its file, and of its baseline.
    name: str
    # One sentence: what the scenario watches.
    description: str
    config: RLTrainConfig
    # All of them train in one program. Their spread says how far a loss may move by chance, which takes three of them.
    seeds: Annotated[tuple[int, ...], MinLen(3), SEEDS]


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob(f"*{_SUFFIX}"))


def find_scenario(name: str) -> Scenario:
    """A shipped scenario by its name, or one's own by the path of its file."""
    if name.endswith(_SUFFIX) or "/" in name:
        return load_scenario(pathlib.Path(name))
    if name not in shipped_names():
        known = ", ".join(shipped_names())
        raise ConfigError(
            f"unknown scenario {name!r}{hint(name, shipped_names())}\nknown scenarios: {known}; or give the path of a "
            f"{_SUFFIX} file"
        )
    return load_scenario(SHIPPED / f"{name}{_SUFFIX}")


def load_scenario(path: pathlib.Path) -> Scenario:
    """Reads the file of a scenario; a config that is a file is looked for beside the file of the scenario."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), ConfigLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"scenario {path} cannot be read: {' '.join(str(error).split())}") from error
    try:
        return _create(path, content)
    except ConfigError as error:
        raise ConfigError(f"scenario {path}: {error}") from error


def _create(path: pathlib.Path, content: Any) -> Scenario:
    for problem in _problems(path, content):
        raise ConfigError(problem)
    name = content["config"]
    beside = path.parent / name
    config = find_config(str(beside) if beside.is_file() else name)
    changed = apply_config_overrides(config, content.get("overrides"))
    scenario = Scenario(path.stem, content.get("description", ""), changed, tuple(content["seeds"]))
    require_bounds(scenario, error_type=ConfigError)
    return scenario


def _problems(path: pathlib.Path, content: Any) -> Iterator[str]:
    """What is wrong with the keys of the file and the types of their values."""
    expected: dict[str, type] = {"description": str, "config": str, "seeds": list, "overrides": dict}
    if not isinstance(content, dict) or not {"config", "seeds"} <= content.keys():
        yield "expected the keys config (a preset or a file) and seeds (a list), and optionally overrides, description"
        return
    if not is_plain_name(path.stem):
        yield "the name of the file is the name of the scenario and must be a plain name"
    for key, value in content.items():
        if key not in expected:
            yield f"unknown key {key!r}{hint(str(key), expected)}; known: {', '.join(expected)}"
        elif not isinstance(value, expected[key]):
            yield f"{key} must be a {expected[key].__name__}; found {value!r}"
    seeds = content["seeds"]
    if any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
        yield f"seeds must be different whole numbers; found {seeds}"
