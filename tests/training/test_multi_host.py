"""Several processes as one run, for real: two processes with four devices each, on loopback."""

import pathlib
import re
import socket
import subprocess
import time

import numpy as np
import pytest
from training_helpers import Finished, Processes, arrays_of, finish, metrics_of, state_config

from acrlpd.config import RLTrainConfig
from acrlpd.training.run_directory import run_directory, saved_steps

STEPS = 20
SHARDED = {"fsdp_devices": 4, "fsdp__min_size_mib": 1e-3, "offline_steps": STEPS, "save_frequency": 10}


def start_two(processes: Processes, config: RLTrainConfig, orders: list[dict] | None = None, **options: object):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for process_id in range(2):
        distributed = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": process_id}
        order = {"distributed": distributed, **(orders[process_id] if orders else {})}
        started.append(processes.start(config, devices=4, order=order, **options))
    return started


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> pathlib.Path:
    config = state_config(tmp_path_factory.mktemp("runs"), exp_name="two", **SHARDED)
    results = [finish(process) for process in start_two(processes, config)]
    assert [result.returncode for result in results] == [0, 0], results
    assert "saved checkpoint" in results[0].output
    assert "saved checkpoint" not in results[1].output  # one process logs
    return run_directory(config)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> pathlib.Path:
    config = state_config(tmp_path_factory.mktemp("runs"), exp_name="one", **SHARDED)
    result = processes.run(config, devices=8)
    assert result.returncode == 0, result.output
    return run_directory(config)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_two_processes_train_as_one(two_processes: pathlib.Path, one_process: pathlib.Path) -> None:
    assert_close(arrays_of(two_processes / str(STEPS)), arrays_of(one_process / str(STEPS)))
    lines = metrics_of(two_processes)
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    for line, expected in zip(lines, metrics_of(one_process), strict=True):
        np.testing.assert_allclose(line["total_loss"], expected["total_loss"], rtol=1e-4)


def test_both_processes_write_the_checkpoint(two_processes: pathlib.Path) -> None:
    assert saved_steps(two_processes) == [STEPS]
    writers = (two_processes / str(STEPS) / "train_state").glob("ocdbt.process_*")
    assert {path.name for path in writers} == {"ocdbt.process_0", "ocdbt.process_1"}


def test_resumed_on_one_process(
    two_processes: pathlib.Path, processes: Processes, tmp_path: pathlib.Path
) -> None:
    """Two processes with 8 devices save; one process with one device goes on, and the reverse."""
    config = state_config(
        two_processes.parents[1], exp_name="two", **SHARDED | {"fsdp_devices": 1, "offline_steps": STEPS + 5}
    )
    before = arrays_of(two_processes / str(STEPS))
    result = processes.run(config, resume=True, allow_changed=["training.offline_steps"])
    assert result.returncode == 0, result.output
    after = arrays_of(two_processes / str(STEPS + 5))
    assert after[".step"] == STEPS + 5
    assert before.keys() == after.keys()
    config = state_config(two_processes.parents[1], exp_name="two", **SHARDED | {"offline_steps": STEPS + 10})
    results = [
        finish(p)
        for p in start_two(processes, config, resume=True, allow_changed=["training.offline_steps"])
    ]
    assert [result.returncode for result in results] == [0, 0], results
    assert saved_steps(two_processes)[-1] == STEPS + 10


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"step {step}":
            return
    raise AssertionError(f"the process ended before step {step}")


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_process_says_so_when_one_is_killed(
    victim: int, processes: Processes, tmp_path: pathlib.Path
) -> None:
    config = state_config(tmp_path, exp_name="killed", **SHARDED | {"offline_steps": 100_000})
    orders = [{"report_steps": True}, {"report_steps": True}]
    both = start_two(processes, config, orders)
    for process in both:
        wait_for_step(process, 30)
    both[victim].kill()
    start = time.monotonic()
    survivor: Finished = finish(both[1 - victim], timeout=60)
    finish(both[victim])
    assert time.monotonic() - start < 60
    assert survivor.returncode == 1
    last = survivor.output.strip().splitlines()[-1]
    assert re.search(rf"process {1 - victim} of 2 ends .* another process died .* --resume", last)


def test_a_signal_to_one_process_stops_both_at_the_same_step(
    processes: Processes, tmp_path: pathlib.Path
) -> None:
    config = state_config(tmp_path, exp_name="stopped", **SHARDED | {"offline_steps": 100_000})
    both = start_two(processes, config, [{}, {"signal_before_step": 12, "signal": 15}])
    results = [finish(process) for process in both]
    assert [result.returncode for result in results] == [143, 143], results
    (step,) = saved_steps(run_directory(config))
    assert step > 12
    assert arrays_of(run_directory(config) / str(step))[".step"] == step
