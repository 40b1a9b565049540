import contextlib
import errno
import fcntl
import logging
import pathlib
import shutil
from typing import IO

import pytest
from training_helpers import Processes, state_config

from acrlpd.config import ConfigError, load_config
from acrlpd.runs.directory import (
    is_finished,
    only_trainer,
    prepare_run_directories,
    run_directories,
    run_directory,
    saved_steps,
    warn_about_space,
    write_run_config,
)
from acrlpd.training.experiment import write_report


@pytest.fixture
def earlier(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with two checkpoints and one that was being written."""
    config = state_config(tmp_path, exp_name="earlier")
    directory = run_directory(config)
    for name in ("10", "20", "30.orbax-checkpoint-tmp"):
        (directory / name).mkdir(parents=True)
    write_run_config(directory, config)
    return directory


def test_path_and_config(earlier: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert earlier == tmp_path / "debug" / "earlier"
    assert load_config(earlier / "config.yaml") == state_config(tmp_path, exp_name="earlier")


def test_only_complete_checkpoints_count(earlier: pathlib.Path) -> None:
    assert saved_steps(earlier) == [10, 20]


def test_an_earlier_run_is_not_touched_unasked(earlier: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints up to step 20.*--resume.*--overwrite.*--exp_name"):
        prepare_run_directories([earlier], resume=False, overwrite=False)
    assert saved_steps(earlier) == [10, 20]


def test_a_start_that_failed_does_not_block_the_next_one(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path)
    directory = run_directory(config)
    (directory / "baselines" / "bc").mkdir(parents=True)
    for where in (directory, directory / "baselines" / "bc"):
        write_run_config(where, config)
    (directory / "config.yaml.tmp").touch()  # a kill came while the config was written again
    prepare_run_directories([directory], resume=False, overwrite=False)
    (directory / "baselines" / "bc" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds a run without a checkpoint"):
        prepare_run_directories([directory], resume=False, overwrite=False)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_link_to_another_disk_is_a_run_also_while_the_disk_is_away(is_away: bool, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path)
    directory = run_directory(config)
    directory.mkdir(parents=True)
    write_run_config(directory, config)
    if not is_away:
        (tmp_path / "disk" / "params").mkdir(parents=True)
    (directory / "20").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="holds a run"):
        prepare_run_directories([directory], resume=False, overwrite=False)
    assert (directory / "20").is_symlink()


def test_overwrite_says_what_it_removes(earlier: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "acrlpd"):
        prepare_run_directories([earlier], resume=False, overwrite=True)
    assert "2 checkpoints (10, 20), 30.orbax-checkpoint-tmp, config.yaml" in caplog.text
    assert list(earlier.iterdir()) == []


def test_overwrite_spares_what_is_not_a_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigError, match="not the directory of a run"):
        prepare_run_directories([tmp_path], resume=False, overwrite=True)
    assert (tmp_path / "photos").exists()


def test_a_directory_in_which_another_process_trains_is_left_alone(earlier: pathlib.Path, processes: Processes) -> None:
    config = load_config(earlier / "config.yaml")
    found = sorted(earlier.iterdir())
    with only_trainer(earlier):
        with pytest.raises(ConfigError, match=r"earlier: another process is training here"):
            prepare_run_directories([earlier], resume=False, overwrite=True)
        resumed = processes.run(config, resume=True)
    assert resumed.returncode != 0
    assert f"{earlier}: another process is training here" in resumed.output
    assert [path for path in sorted(earlier.iterdir()) if path.name != ".lock"] == found
    prepare_run_directories([earlier], resume=False, overwrite=True)  # it has ended


def start(*directories: pathlib.Path, resume: bool = False, overwrite: bool = False) -> contextlib.ExitStack:
    """A run that has made its directories and goes on until the stack is closed."""
    stack = contextlib.ExitStack()
    stack.enter_context(run_directories(directories, resume=resume, overwrite=overwrite))
    return stack


def entries(directory: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}], ids=str)
@pytest.mark.parametrize("has_config", [False, True])
def test_a_run_that_is_starting_keeps_its_directory(
    has_config: bool, flags: dict[str, bool], tmp_path: pathlib.Path
) -> None:
    """Until its first metrics, the directory of a run looks as if a start had failed there."""
    config = state_config(tmp_path)
    directory = run_directory(config)
    with start(directory):
        if has_config:
            write_run_config(directory, config)
        found, lock = entries(tmp_path), (directory / ".lock").stat().st_ino
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"another process is training here|there is no run in"):
                start(directory, **flags)
            assert entries(tmp_path) == found and (directory / ".lock").stat().st_ino == lock
    with start(directory):  # the first one has ended
        pass


def test_of_several_runs_one_of_which_is_busy_only_the_busy_one_is_left(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path)
    seeds = [tmp_path / "debug" / f"first-seed{seed}" for seed in range(4)]
    seeds[3].mkdir(parents=True)
    write_run_config(seeds[3], config)  # left by a process that was killed
    with start(seeds[1]):
        write_run_config(seeds[1], config)
        found = entries(tmp_path)
        with pytest.raises(ConfigError, match="first-seed1: another process is training here"):
            start(*seeds)
        assert entries(tmp_path) == found
        with pytest.raises(ConfigError, match="first-seed1: another process is training here"):
            start(seeds[1])  # the lock is intact, too


@pytest.mark.parametrize("was_there", [False, True])
def test_a_start_that_fails_leaves_what_was_there(was_there: bool, tmp_path: pathlib.Path) -> None:
    """The user may have made the directory, for example as a link to a large disk."""
    config = state_config(tmp_path / "runs")
    directory = run_directory(config)
    if was_there:
        directory.mkdir(parents=True)
    found = entries(tmp_path)
    with pytest.raises(KeyboardInterrupt), start(directory):
        for where in (directory, directory / "baselines" / "bc"):
            where.mkdir(parents=True, exist_ok=True)
            write_run_config(where, config)
        raise KeyboardInterrupt
    assert entries(tmp_path) == found


def test_a_failed_start_is_removed_before_another_process_can_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = state_config(tmp_path)
    directory, unlink, removed = run_directory(config), pathlib.Path.unlink, []

    def start_meanwhile(path: pathlib.Path, missing_ok: bool = False) -> None:
        with pytest.raises(ConfigError, match="another process is training here"), only_trainer(directory):
            pass
        removed.append(path.name)
        unlink(path, missing_ok)

    with pytest.raises(KeyboardInterrupt), start(directory):
        write_run_config(directory, config)
        monkeypatch.setattr(pathlib.Path, "unlink", start_meanwhile)
        raise KeyboardInterrupt
    assert removed == ["config.yaml", ".lock"] and not directory.exists()


def test_a_lock_that_was_removed_while_it_was_taken_is_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def take_late(lock: IO[str], operation: int) -> None:
        (tmp_path / ".lock").unlink()  # by the process that held it
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", take_late)
    with pytest.raises(ConfigError, match="start again"), only_trainer(tmp_path):
        raise AssertionError("a second process could start in the same directory")


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_stays_when_its_next_start_fails(resume: bool, earlier: pathlib.Path) -> None:
    found = entries(earlier)
    with pytest.raises((ConfigError, KeyboardInterrupt)), start(earlier, resume=resume):
        raise KeyboardInterrupt
    assert [name for name in entries(earlier) if name != ".lock"] == found


def test_a_run_that_has_begun_stays_when_it_fails(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KeyboardInterrupt), start(tmp_path / "first"):
        (tmp_path / "first" / "metrics.jsonl").touch()
        raise KeyboardInterrupt
    assert entries(tmp_path) == ["first", "first/.lock", "first/metrics.jsonl"]


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, "acrlpd"), only_trainer(tmp_path):
        assert "cannot be locked" in caplog.text


def test_a_place_that_cannot_be_written_to_is_named() -> None:
    with pytest.raises(ConfigError, match=r"run directory /proc/runs.*set checkpoints\.directory"):
        prepare_run_directories([pathlib.Path("/proc/runs")], resume=False, overwrite=False)


def test_nothing_to_resume(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        prepare_run_directories([tmp_path / "nothing"], resume=True, overwrite=False)


def test_too_little_space_is_said_before_it_is_missed(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "acrlpd"):
        free = shutil.disk_usage(tmp_path).free
        warn_about_space(tmp_path, 1, max_to_keep=1)
        warn_about_space(tmp_path, free // 5, max_to_keep=2)
        assert not caplog.text
        warn_about_space(tmp_path, free // 3, max_to_keep=4)  # four that stay, and one before the oldest goes
    assert " free; checkpoints of " in caplog.text


def test_a_damaged_summary_is_named(earlier: pathlib.Path) -> None:
    (earlier / "summary.json").write_text('{"status": "finis')
    with pytest.raises(ValueError, match=r"earlier/summary\.json is damaged"):
        is_finished(earlier)


def test_a_run_that_cannot_be_reported_on_has_still_succeeded(
    earlier: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (earlier / "metrics.jsonl").write_text('{"step": 5, "total_loss": 1.0}\n')
    (earlier / "evaluations" / "5").mkdir(parents=True)
    (earlier / "evaluations" / "5" / "evaluation.json").write_text("{")
    write_report([earlier])
    assert "evaluation.json" in caplog.text and "`acrlpd report" in caplog.text
