"""Several processes as one run, for real: two processes with two devices each, on loopback."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from training_helpers import Finished, Processes, arrays_of, finish, metrics_of, state_config, train_here

from acrlpd.config import RLTrainConfig, save_config
from acrlpd.runs.directory import run_directory, saved_steps
from acrlpd.training.distributed import DistributedOptions, initialize_distributed

STEPS = 20
SHARDED = {
    "model__hidden_dims": (512, 512),  # large enough for both processes to write a part
    "fsdp_devices": 2,  # those of one process
    "fsdp__min_size_mib": 1e-3,
    "offline_steps": STEPS,
    "save_frequency": 5,
    "data__validation_share": 0.25,  # the processes judge together, too
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(
    processes: Processes, config: RLTrainConfig, orders: list[dict] | None = None, **options: object
) -> "list[subprocess.Popen[str]]":
    """Both processes of a run, as if on two hosts with two devices each."""
    port = free_port()
    started = []
    for process_id in range(2):
        distributed = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": process_id}
        order = {"distributed": distributed, **(orders[process_id] if orders else {})}
        started.append(processes.start(config, devices=2, order=order, **options))
    return started


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results_of_two(base: pathlib.Path, processes: Processes) -> list[Finished]:
    """Two processes train as one run; the disk of one of them is full at step 10."""
    config = state_config(base, exp_name="two", **SHARDED)
    # The processes do not wait long for each other in the save that fails. In the others they wait as long as it takes.
    waits = {"short_barriers_before_step": 8, "long_barriers_before_step": 13}
    full = {"limit_files_before_step": 8, "file_limit_bytes": 8_192, "unlimit_files_before_step": 13}
    results = [finish(process) for process in start_two(processes, config, [waits, waits | full])]
    assert [result.returncode for result in results] == [0, 0], results
    return results


@pytest.fixture(scope="module")
def two_processes(base: pathlib.Path, results_of_two: list[Finished]) -> pathlib.Path:
    return run_directory(state_config(base, exp_name="two"))


@pytest.fixture(scope="module")
def one_process(base: pathlib.Path) -> pathlib.Path:
    """The same training on the one device of this process."""
    config = state_config(base, exp_name="one", **SHARDED | {"fsdp_devices": 1})
    train_here(config)
    return run_directory(config)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_two_processes_train_as_one(two_processes: pathlib.Path, one_process: pathlib.Path) -> None:
    assert_close(arrays_of(two_processes / str(STEPS)), arrays_of(one_process / str(STEPS)))
    lines = metrics_of(two_processes)
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 20]  # the last line is that of the validation
    for line, expected in zip(lines, metrics_of(one_process), strict=True):
        for name in {"total_loss", "validation/flow_loss", "validation/q_rmse"} & expected.keys():
            np.testing.assert_allclose(line[name], expected[name], rtol=1e-4)


def test_both_processes_write_the_checkpoint(two_processes: pathlib.Path) -> None:
    assert saved_steps(two_processes) == [STEPS]
    writers = (two_processes / str(STEPS) / "train_state").glob("ocdbt.process_*")
    assert {path.name for path in writers} == {"ocdbt.process_0", "ocdbt.process_1"}


def test_one_process_logs(results_of_two: list[Finished]) -> None:
    assert ["saved checkpoint" in result.output for result in results_of_two] == [True, False]


def test_a_full_disk_on_one_host_costs_all_of_them_one_checkpoint(
    two_processes: pathlib.Path, results_of_two: list[Finished]
) -> None:
    for result in results_of_two:
        assert result.output.count("could not be written") == 1, result.output
        assert "the checkpoint of step 10 could not be written" in result.output
    saved = re.findall(rf"saved checkpoint.*{two_processes}/(\d+)", results_of_two[0].output)
    assert saved == ["5", "15", "20"]
    assert json.loads((two_processes / "summary.json").read_text())["failed_saves"] == 1
    assert not list(two_processes.glob("*tmp*"))


@pytest.mark.slow
def test_resumed_on_one_process_and_back_then_stopped_by_a_signal_to_one(
    base: pathlib.Path, two_processes: pathlib.Path, processes: Processes
) -> None:
    """4 devices save, one goes on, 4 go on; a signal to one process ends both at the same step."""
    more = {"allow_changed": ("training.offline_steps",)}
    config = state_config(base, exp_name="two", **SHARDED | {"fsdp_devices": 1, "offline_steps": STEPS + 5})
    train_here(config, resume=True, **more)
    assert arrays_of(two_processes / str(STEPS + 5))[".step"] == STEPS + 5

    config = state_config(base, exp_name="two", **SHARDED | {"offline_steps": 100_000})
    orders = [{}, {"signal_before_step": STEPS + 12, "signal": 15}]
    results = [finish(process) for process in start_two(processes, config, orders, resume=True, **more)]
    assert [result.returncode for result in results] == [143, 143], results
    step = saved_steps(two_processes)[-1]
    assert step > STEPS + 12
    assert arrays_of(two_processes / str(step))[".step"] == step


@pytest.mark.slow
def test_the_other_process_says_so_when_one_is_killed(tmp_path: pathlib.Path) -> None:
    """The error of the exchange that fails is not an error of the survivor, which shows a message and no traceback."""
    config = state_config(tmp_path, exp_name="killed", **SHARDED | {"fsdp_devices": 1, "offline_steps": 100_000})
    save_config(config, tmp_path / "killed.yaml")
    coordinator = f"127.0.0.1:{free_port()}"
    both = [start_script(TRAIN, coordinator, i, str(tmp_path / "killed.yaml")) for i in range(2)]
    while not metrics_of(run_directory(config)) and both[0].poll() is None:
        time.sleep(0.05)
    both[1].kill()
    assert finish(both[1]).returncode == -9
    survivor = finish(both[0])
    assert_explained(survivor, "process 0 of 2")
    assert "Traceback" not in survivor.output


@pytest.mark.slow
def test_processes_that_are_ready_at_different_times_start_together(
    tmp_path: pathlib.Path, processes: Processes
) -> None:
    """A collective that the others are half a minute late for is an error where it connects them for the first time."""
    config = state_config(tmp_path, **SHARDED | {"offline_steps": 1})
    results = [finish(process) for process in start_two(processes, config, [{}, {"sleep_s": 40}])]
    assert [result.returncode for result in results] == [0, 0], results


def assert_explained(survivor: Finished, who: str) -> None:
    assert survivor.returncode == 1, survivor.output
    last = survivor.output.strip().splitlines()[-1]
    assert re.search(rf"{who} ends .* another process died .* --resume", last)


TRAIN = """
import sys
from acrlpd.cli.main import main
from acrlpd.training import distributed
distributed.HEARTBEAT_TIMEOUT_S = 10
coordinator, process_id, config, *options = sys.argv[1:]
processes = ["--coordinator", coordinator, "--num_processes", "2", "--process_id", process_id]
sys.exit(main(["train", "--config", config, *options, *processes]))
"""


def test_a_process_that_refuses_the_run_does_not_blame_the_others(tmp_path: pathlib.Path) -> None:
    """Only process 0 looks at the run directory; --resume, the advice after a death, would be wrong here."""
    (tmp_path / "debug" / "a" / "10").mkdir(parents=True)
    coordinator = f"127.0.0.1:{free_port()}"
    options = ("debug", "--exp_name", "a", "--checkpoint_dir", str(tmp_path))
    both = [start_script(TRAIN, coordinator, process_id, *options) for process_id in range(2)]
    refused, other = (finish(process) for process in both)
    assert "holds a run with checkpoints up to step 10" in refused.output
    last = refused.output.strip().splitlines()[-1]
    assert last.startswith("acrlpd: process 0 of 2 ends because of its own error above")
    assert_explained(other, "process 1 of 2")


WAIT_FOR_EACH_OTHER = """
import jax, os, signal, sys, time
from acrlpd.training.distributed import (
    DistributedOptions, barrier, initialize_distributed, numbers_of_first_process
)
process_id = int(sys.argv[2])
initialize_distributed(DistributedOptions(coordinator=sys.argv[1], num_processes=2, process_id=process_id))
print("agreed:", numbers_of_first_process({"loss": 0.1 + process_id * 1e-16, "error": process_id}), flush=True)
print("cache:", jax.config.jax_enable_compilation_cache, flush=True)
barrier("both are here", timeout_s=300)
if process_id == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def killed_coordinator() -> tuple[Finished, Finished]:
    """Process 0, which was killed, and process 1."""
    coordinator = f"127.0.0.1:{free_port()}"
    both = [start_script(WAIT_FOR_EACH_OTHER, coordinator, process_id) for process_id in range(2)]
    return finish(both[0]), finish(both[1])


def test_the_other_process_says_so_when_the_coordinator_is_killed(
    killed_coordinator: tuple[Finished, Finished],
) -> None:
    coordinator, survivor = killed_coordinator
    assert coordinator.returncode == -9
    assert_explained(survivor, "process 1 of 2")


def test_processes_decide_by_the_numbers_of_the_first_one(killed_coordinator: tuple[Finished, Finished]) -> None:
    """A loss that differs in its last digit may be the best so far on one host alone, which would then save alone."""
    assert ["agreed: {'loss': 0.1, 'error': 0.0}" in process.output for process in killed_coordinator] == [True, True]


def test_processes_on_cpus_all_compile_their_programs(killed_coordinator: tuple[Finished, Finished]) -> None:
    """One from the cache and one compiled anew may exchange their arrays in different orders."""
    assert ["cache: False" in process.output for process in killed_coordinator] == [True, True]


WAIT_IN_VAIN = """
import sys, time
from acrlpd.training.distributed import DistributedOptions, barrier, initialize_distributed
process_id = int(sys.argv[2])
initialize_distributed(DistributedOptions(coordinator=sys.argv[1], num_processes=2, process_id=process_id))
if process_id == 0:
    barrier("a name", timeout_s=2)
time.sleep(3600)
"""


def test_a_barrier_that_nobody_else_comes_to_is_an_error() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    both = [start_script(WAIT_IN_VAIN, coordinator, process_id) for process_id in range(2)]
    assert both[0].stdout is not None
    message = "PeerError: process 0 of 2 waited 2 s at 'a name' for processes that did not come"
    assert any(message in line for line in both[0].stdout)  # before process 1 ends, which the test decides
    for process in both:
        process.kill()
        finish(process)


def start_script(script: str, coordinator: str, process_id: int, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, coordinator, str(process_id), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"coordinator": "127.0.0.1:1"}, "missing: --num_processes, --process_id"),
        ({"process_id": 0, "num_processes": 2}, "missing: --coordinator"),
    ],
)
def test_half_a_description_of_the_processes_is_refused(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        initialize_distributed(DistributedOptions(**options))


def test_one_process_needs_no_description() -> None:
    assert initialize_distributed(DistributedOptions()) is False
