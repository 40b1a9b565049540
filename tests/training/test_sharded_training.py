"""The same step on one device and on eight, with the state split over them."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from training_helpers import Processes, metrics_of, sharded_config, train_here

from acrlpd.runs.directory import run_directory


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run directory of the same training on one device."""
    config = sharded_config(tmp_path_factory.mktemp("one"), fsdp_devices=1)
    train_here(config)
    return run_directory(config)


@pytest.fixture(scope="module")
def eight(one: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> dict[str, Any]:
    """What a process with eight devices found."""
    script = pathlib.Path(__file__).with_name("sharded_process.py")
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("eight")), str(one)],
        capture_output=True,
        text=True,
        env=processes.environment(devices=8),
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_eight_devices_compute_what_one_computes(eight: dict[str, Any], one: pathlib.Path) -> None:
    np.testing.assert_allclose(eight["losses"], [line["total_loss"] for line in metrics_of(one)], rtol=1e-4)


def test_the_state_is_born_in_its_place_and_stays_there(eight: dict[str, Any]) -> None:
    assert eight["misplaced"] == []
    assert eight["device_bytes"] < 0.35 * eight["total_bytes"]  # a quarter, and what is too small to split


def test_nothing_is_compiled_after_the_first_step(eight: dict[str, Any]) -> None:
    assert eight["compiled_after_first_step"] == []


def test_layers_are_gathered_one_at_a_time(eight: dict[str, Any]) -> None:
    """The dummy experts have 4 layers: no gathered array may hold them all, and no 4 may lie side by side."""
    shapes = [tuple(int(n) for n in text.split(",") if n) for text in eight["gathered"]]
    assert shapes, "the weights are sharded, so something must be gathered"
    stacked = [shape for shape in shapes if len(shape) >= 3 and shape[0] == 4]
    assert not stacked
    down_projection = "128,64"
    assert eight["gathered"].count(down_projection) >= 4
    assert eight["gathered_outside_loops"].count(down_projection) < 4


def test_checkpoints_can_be_read_on_other_meshes(eight: dict[str, Any]) -> None:
    assert eight["same_elsewhere"]
    assert eight["one_is_same_elsewhere"]
