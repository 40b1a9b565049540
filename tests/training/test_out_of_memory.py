"""A first step that does not fit, for real: the process may not use much more memory than it has."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from training_helpers import Processes, state_config

from acrlpd.config import RLTrainConfig, apply_config_overrides, load_config
from acrlpd.config.plan.plan import larger_accumulations
from acrlpd.runs.directory import run_directory, saved_steps
from acrlpd.training.experiment import run_experiment
from acrlpd.training.learner import Learner
from acrlpd.training.options import RunOptions
from acrlpd.training.out_of_memory import OutOfMemoryError, answer_out_of_memory

# The first step wants nearly 1 GiB; with two micro-batches it is less than 0.75 GiB.
LIMIT = {"memory_headroom_bytes": 13 * 2**26}


def hungry_config(directory: pathlib.Path) -> RLTrainConfig:
    return state_config(
        directory,
        offline_steps=1,
        save_frequency=1,
        log_frequency=1,
        batch_size=2**14,
        acrlpd__num_action_samples=8,
        acrlpd__sampling_steps=1,
        acrlpd__best_of_n__strategy="parallel",
        model__hidden_dims=(256, 256),
        critic__hidden_dims=(256, 256),
        critic__use_layer_norm=False,  # its kernels take memory of their own, which the compiler does not plan
    )


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ("parallel", "--acrlpd.best_of_n.strategy sequential"),
        ("sequential", "--training.gradient_accumulation_steps 2"),
    ],
)
def test_the_answer_names_the_smallest_change(tmp_path: pathlib.Path, strategy: str, change: str) -> None:
    """Candidates one after the other come first: this change keeps every update as it is."""
    config = apply_config_overrides(hungry_config(tmp_path), {"acrlpd.best_of_n.strategy": strategy})
    with pytest.raises(OutOfMemoryError) as error, answer_out_of_memory(config, is_first_step=True):
        jnp.zeros(2**50)
    assert error.value.next_accumulation == 2
    message = str(error.value)
    assert "the first step does not fit into memory: RESOURCE_EXHAUSTED" in message
    assert f"by the plan: {change}; --auto_batch" in message
    assert "JAX finds no GPU or TPU here" in message  # Most often a policy for a GPU has met a CPU.


def test_a_cpu_that_runs_out_of_memory_inside_a_program(tmp_path: pathlib.Path) -> None:
    """What JAX said for a full pi0 on a CPU of 24 GiB; it says so only while other programs run."""
    said = "INTERNAL: Error dispatching computation: Out of memory allocating 30932346436 bytes."
    expected = pytest.raises(OutOfMemoryError, match="the first step does not fit into memory: INTERNAL")
    with expected, answer_out_of_memory(hungry_config(tmp_path), is_first_step=True):
        raise jax.errors.JaxRuntimeError(said)


def test_a_later_step_and_other_errors_are_left_alone(tmp_path: pathlib.Path) -> None:
    config = hungry_config(tmp_path)
    with pytest.raises(jax.errors.JaxRuntimeError), answer_out_of_memory(config, is_first_step=False):
        jnp.zeros(2**50)
    with pytest.raises(ZeroDivisionError), answer_out_of_memory(config, is_first_step=True):
        1 // 0


def test_a_run_without_memory_leaves_no_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = state_config(tmp_path, offline_steps=1)

    def fail(self: Learner, *_: object, **__: object) -> None:
        assert (run_directory(config) / "metrics.jsonl").is_file()
        jnp.zeros(2**50)

    monkeypatch.setattr(Learner, "update", fail)
    with pytest.raises(OutOfMemoryError):
        run_experiment(config, RunOptions())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_auto_batch_keeps_the_batch_and_raises_accumulation(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = hungry_config(tmp_path)
    result = processes.run(config, order=LIMIT, auto_batch=True)
    assert result.returncode == 0, result.output
    assert "--auto_batch: trying gradient_accumulation_steps=2" in result.output
    used = load_config(run_directory(config) / "config.yaml")
    assert used.training.gradient_accumulation_steps > 1
    assert used.batch_size == config.batch_size
    assert saved_steps(run_directory(config)) == [1]


@pytest.mark.parametrize(
    ("batch_size", "now", "devices", "expected"),
    [(8, 1, 1, 2), (8, 2, 1, 4), (12, 1, 4, 3), (8, 8, 1, None), (8, 1, 8, None)],
)
def test_micro_batches_come_out_even_on_every_device(
    batch_size: int, now: int, devices: int, expected: int | None, tmp_path: pathlib.Path
) -> None:
    config = state_config(tmp_path, batch_size=batch_size, gradient_accumulation_steps=now)
    assert next(larger_accumulations(config, devices), None) == expected
