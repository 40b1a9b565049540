"""The directory of a study: what identifies the study, Optuna's journal, the trials, and the results.

A study goes on where it was interrupted. A directory that belongs to another config, another space or other settings is
refused, because results of both would be compared with each other.
"""

import dataclasses
import json
import pathlib

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, config_to_yaml
from acrlpd.config.yaml_files import require_same_config
from acrlpd.files import read_json_object, write_text_atomically
from acrlpd.runs.directory import CONFIG_FILE, run_directory
from acrlpd.tuning.space import Space, load_space

SPACE_FILE = "space.yaml"
SETTINGS_FILE = "study.json"
BEST_FILE = "best.yaml"
REPORT_FILE = "report.md"
TRIALS = "trials"
FINAL = "final"
_JOURNAL = "journal.log"
_OTHER_STUDY = "choose another --exp_name for a new study, or go on with the old one as it was"


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """How all trials of a study are made. `split` is the number of trials of each stage at the first start."""

    seeds: tuple[int, ...]
    trial_steps: int | None
    evaluations: int
    split: tuple[int, ...]


def study_directory(config: RLTrainConfig) -> pathlib.Path:
    return run_directory(apply_config_overrides(config, exp_name=f"{config.exp_name}-tune"))


def split_evenly(trials: int, num_stages: int) -> tuple[int, ...]:
    """The number of trials of each stage; the first stages get what is left over."""
    return tuple(trials // num_stages + (stage < trials % num_stages) for stage in range(num_stages))


def claim(directory: pathlib.Path, config: RLTrainConfig, space: Space, settings: StudySettings) -> StudySettings:
    """Writes down what the study is, or finds that it is the study of this directory; returns the settings in use.

    The split of the trials over the stages stays as it was at the first start.
    """
    file = directory / SETTINGS_FILE
    if file.exists():
        return _require_equal(directory, config, space, settings)
    write_text_atomically(directory / CONFIG_FILE, config_to_yaml(config))
    write_text_atomically(directory / SPACE_FILE, space.to_yaml())
    write_text_atomically(file, json.dumps(dataclasses.asdict(settings), indent=2) + "\n")
    return settings


def _require_equal(
    directory: pathlib.Path, config: RLTrainConfig, space: Space, settings: StudySettings
) -> StudySettings:
    require_same_config(directory / CONFIG_FILE, config, "a study", _OTHER_STUDY)
    old_space = load_space(directory / SPACE_FILE, config)
    if old_space != space:
        old_lines, new_lines = old_space.to_yaml().splitlines(), space.to_yaml().splitlines()
        changed = [f"  - {line.strip()}" for line in old_lines if line not in new_lines]
        changed += [f"  + {line.strip()}" for line in new_lines if line not in old_lines]
        shown = "\n".join(changed[:10] or ["  the order of the stages"])
        raise ConfigError(f"{directory} holds a study of another space:\n{shown}\n{_OTHER_STUDY}")
    try:
        content = read_json_object(directory / SETTINGS_FILE)
        lists = {name: tuple(content[name]) for name in ("seeds", "split")}
        old = StudySettings(**(content | lists))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{directory / SETTINGS_FILE} is damaged: {error}; take it from a backup") from error
    for name in ("seeds", "trial_steps", "evaluations"):
        before, now = getattr(old, name), getattr(settings, name)
        if before != now:
            raise ConfigError(f"{directory} holds a study with --{name} {before}; found {now}. {_OTHER_STUDY}")
    return old


def share_trials(trials: int, split: tuple[int, ...]) -> tuple[int, ...]:
    """The number of trials of each stage.

    The split is that of the first start. If the number of all trials has changed since, the last stages get the change.
    """
    shares: list[int] = []
    for share in split[:-1]:
        shares.append(min(share, trials - sum(shares)))
    return *shares, trials - sum(shares)


def open_storage(directory: pathlib.Path) -> JournalStorage:
    """Optuna's storage in the directory, whose lock this process holds. What a kill left unfinished is removed."""
    journal = directory / _JOURNAL
    lock = journal.with_name(f"{_JOURNAL}.lock")
    lock.unlink(missing_ok=True)
    if journal.exists():
        with journal.open("r+b") as file:  # The last line may be cut off: Optuna would append to it.
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal))))
