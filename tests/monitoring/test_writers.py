"""TensorBoard and Weights & Biases, with the real packages, and what happens when they fail."""

import importlib.util
import logging
import pathlib
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from monitoring_helpers import state_config

from acrlpd.config import ConfigError
from acrlpd.monitoring import writers
from acrlpd.monitoring.run_monitor import RunMonitor
from acrlpd.monitoring.writers import Writers


def events(directory: pathlib.Path) -> Iterator[Any]:
    """The events of all files, in the order in which TensorBoard reads them."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars(directory: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The numbers of every event that has numbers."""
    found = [
        (e.step, {v.tag: v.simple_value for v in e.summary.value if v.HasField("simple_value")})
        for e in events(directory)
    ]
    return [(step, numbers) for step, numbers in found if numbers]


def monitor(directory: pathlib.Path, **settings: Any) -> RunMonitor:
    return RunMonitor(state_config(directory, **settings), directory, is_primary=True)


def start(watch: RunMonitor, step: int) -> None:
    watch.before_update(step, None, None, None)  # type: ignore[arg-type]  # nobody looks at them


def test_tensorboard(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboardX")
    watch = monitor(tmp_path, logging__tensorboard=True)
    start(watch, 1)
    watch.on_line({"step": 10, "phase": "offline", "q_mean": 0.5, "critic_loss": None, "timing/step_s": 0.25})
    watch.on_event({"step": 10, "eval/success_rate": 0.75})
    (step, line), (_, evaluation) = scalars(tmp_path / "tensorboard")  # nothing is held back until the end
    assert step == 10
    assert {name: line[name] for name in ("train/q_mean", "timing/step_s")} == {
        "train/q_mean": 0.5,
        "timing/step_s": 0.25,
    }
    assert line["memory/host_gib"] > 0 and "train/critic_loss" not in line
    assert evaluation == {"eval/success_rate": 0.75}
    watch.close()


def test_tensorboard_forgets_what_an_interrupted_run_wrote_too_much(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboardX")
    for after_step in (-1, -1, 10):  # the first time it was killed before there was a checkpoint
        watch = monitor(tmp_path, logging__tensorboard=True)
        watch.load_state_dict(None, after_step)
        start(watch, max(after_step, 0) + 1)
        watch.on_line({"step": after_step + 10, "q_mean": 0.5})
        watch.close()
    restarts = [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert restarts == [0, 11]


def test_an_evaluation_before_the_first_update_is_written(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboardX")
    watch = monitor(tmp_path, logging__tensorboard=True)
    watch.on_event({"step": 0, "eval/success_rate": 0.25})
    assert scalars(tmp_path / "tensorboard") == [(0, {"eval/success_rate": 0.25})]
    watch.close()


def test_wandb_offline_goes_on_with_the_same_run(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("wandb")
    for step in (10, 20):
        watch = monitor(tmp_path, logging__wandb="offline", logging__alerts__wandb=True)
        start(watch, step - 9)
        watch.on_line({"step": step, "q_mean": 0.5})
        watch.on_end("stopped", step, "stopped by SIGTERM")
        watch.close()
    run_id = (tmp_path / "wandb_run_id.txt").read_text()
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    for path in files:  # W&B's own process writes them, and is not done when it says so
        while b"train/q_mean" not in path.read_bytes() or b"stopped by SIGTERM" not in path.read_bytes():
            time.sleep(0.05)


def test_two_runs_of_one_process_have_their_own_runs_at_wandb(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("wandb")
    watches = {name: monitor(tmp_path / name, logging__wandb="offline") for name in ("first", "second")}
    for name, watch in watches.items():
        (tmp_path / name).mkdir()
        start(watch, 1)
    for name, watch in watches.items():
        watch.on_line({"step": 10, f"only_in_{name}": 0.5})
    for watch in watches.values():
        watch.close()
    for name, other in (("first", "second"), ("second", "first")):
        [path] = (tmp_path / name).glob("wandb/offline-run-*/*.wandb")
        while f"only_in_{name}".encode() not in path.read_bytes():  # W&B's own process writes the file
            time.sleep(0.05)
        assert f"only_in_{other}".encode() not in path.read_bytes()


def test_disabled_writers_write_nothing(tmp_path: pathlib.Path) -> None:
    watch = monitor(tmp_path)
    start(watch, 1)
    watch.on_line({"step": 10, "q_mean": 0.5})
    watch.close()
    assert not list(tmp_path.iterdir())


def test_nothing_is_opened_before_there_is_something_to_write(tmp_path: pathlib.Path) -> None:
    """A dry run makes a monitor, too, and must not start a run at W&B."""
    monitor(tmp_path, logging__wandb="offline", logging__tensorboard=True).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"logging__tensorboard": True}, "tensorboardX"),
        ({"logging__wandb": "offline"}, "wandb"),
        ({"logging__trackio": True}, "trackio"),
    ],
)
def test_a_missing_package_is_an_error_at_the_start(
    settings: dict[str, Any], package: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install .*\["):
        monitor(tmp_path, **settings)


def test_a_full_disk_is_reported_once_and_stops_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboardX")
    watch = monitor(tmp_path, logging__tensorboard=True)
    start(watch, 1)
    records = watch._writers._writers["TensorBoard"]._file._py_recordio_writer  # type: ignore[union-attr, attr-defined]
    with pathlib.Path("/dev/full").open("wb", buffering=0) as full, caplog.at_level(logging.WARNING, "acrlpd"):
        records._writer = full
        for step in range(20):
            watch.on_line({"step": step, "q_mean": 0.5})
        watch.close()
    assert len(caplog.records) == 1
    assert "TensorBoard" in caplog.text and "No space left" in caplog.text


def test_a_writer_that_cannot_start_is_reported_once_and_stops_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / writers.TENSORBOARD_DIRECTORY).write_text("a file is in the way")
    open_writers = Writers(state_config(tmp_path, logging__tensorboard=True), tmp_path)
    with caplog.at_level(logging.WARNING, "acrlpd"):
        for step in range(3):
            open_writers.open(step)
            open_writers.write({"step": step, "q_mean": 0.5})
        open_writers.close()
    assert len(caplog.records) == 1
