"""Tiny configs, and training runs in this process or as processes of their own."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from acrlpd.config import RepackConfig, RLTrainConfig, apply_config_overrides, get_config, save_config
from acrlpd.files import read_json_lines
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.monitoring.run_monitor import MEMORY
from acrlpd.runs.directory import prepare_run_directories, run_directory
from acrlpd.runs.metrics_log import TIMING
from acrlpd.training.checkpoints.reader import load_checkpoint_agent
from acrlpd.training.drive import EvalFn
from acrlpd.training.options import RunOptions
from acrlpd.training.train_runs import train_runs
from acrlpd.training.verification import parts_to_verify

HERE = pathlib.Path(__file__).parent
PROCESS = HERE / "train_process.py"
# How long a process may take. On a busy machine everything takes many times as long as on an idle one.
WAIT_S = 900.0

# Less to compile, nothing less to train.
_SIMPLE = {
    "acrlpd.loss_weights.actor_weight": 0.0,
    "acrlpd.loss_weights.bc_weight": 1.0,
    "acrlpd.learnable_temperature": False,
    "actor_lr_schedule.warmup_steps": 10,
    "actor_lr_schedule.peak_lr": 1e-3,
}


def pi0_config(directory: pathlib.Path, **overrides: Any) -> RLTrainConfig:
    """A tiny pi0 with one camera, augmented, and data prepared ahead by two threads."""
    config = apply_config_overrides(
        get_config("debug"), _SIMPLE | {"batch_size": 16, "model.dtype": "float32", "model.remat_policy": "none"}
    )
    return _finished(config, directory, overrides)


def sharded_config(directory: pathlib.Path, fsdp_devices: int) -> RLTrainConfig:
    """Four steps of the tiny pi0, with arrays split that are not quite tiny."""
    return pi0_config(directory, fsdp_devices=fsdp_devices, fsdp__min_size_mib=0.01, offline_steps=4, log_frequency=1)


def state_config(directory: pathlib.Path, **overrides: Any) -> RLTrainConfig:
    """The state-space policy: compiles and steps fastest."""
    base = get_config("debug")
    model = StateFlowPolicyConfig(state_dim=7, action_dim=7, action_horizon=10, hidden_dims=(32, 32))
    config = dataclasses.replace(
        base,
        model=model,
        data=dataclasses.replace(base.data, repack=RepackConfig()),
        critic=dataclasses.replace(base.critic, use_pi0_features=False, hidden_dims=(32, 32)),
    )
    return _finished(apply_config_overrides(config, _SIMPLE), directory, overrides)


def online_config(directory: pathlib.Path, **overrides: Any) -> RLTrainConfig:
    """The state-space policy in the toy environment, offline and then online."""
    changes = {
        "model__state_dim": 3,
        "model__action_dim": 2,
        "model__action_horizon": 4,
        "qchunking__horizon_length": 3,
        "qchunking__action_dim": 2,
        "env__id": "toy_env:toy",
        "env__num_envs": 2,
        "evaluation__num_episodes": 4,
        "offline_steps": 13,
        "online_steps": 15,
        "online__start_steps": 20,
    }
    return state_config(directory, **(changes | overrides))


def _finished(config: RLTrainConfig, directory: pathlib.Path, overrides: Mapping[str, Any]) -> RLTrainConfig:
    changes = {"checkpoints.directory": str(directory), "checkpoints.keep_period": None} | dict(overrides)
    return apply_config_overrides(config, {key.replace("__", "."): value for key, value in changes.items()})


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    returncode: int
    output: str


class Processes:
    """Starts training processes."""

    def environment(self, devices: int) -> dict[str, str]:
        return {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Where the toy environments are, also for processes that those of the test start.
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE.parent / "envs"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }

    def start(
        self, config: RLTrainConfig, *, devices: int = 1, order: Mapping[str, Any] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        directory = run_directory(config).parent
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{config.exp_name}.yaml"
        save_config(config, path)
        request = {"config": str(path), "options": options, **(order or {})}
        # root may write everywhere, unless it gives that up
        prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
        return subprocess.Popen(
            [*prefix, sys.executable, str(PROCESS), json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(devices),
        )

    def run(self, config: RLTrainConfig, **arguments: Any) -> Finished:
        return finish(self.start(config, **arguments))


def train_here(config: RLTrainConfig, eval_fn: EvalFn | None = None, **options: Any) -> None:
    """A whole run in the process of the test, where a process of its own would show nothing more and cost seconds."""
    directory, run_options = run_directory(config), RunOptions(**options)
    prepare_run_directories([directory], resume=run_options.resume, overwrite=run_options.overwrite)
    assert train_runs([config], [directory], run_options, eval_fn=eval_fn) == 0


def scored(scores: Mapping[str, float]) -> EvalFn:
    """An evaluation with a set outcome for each step."""
    return lambda agent, step: {"success_rate": scores[str(step)]}


def finish(process: "subprocess.Popen[str]") -> Finished:
    try:
        output, _ = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {WAIT_S} s:\n{output}") from None
    return Finished(process.returncode, output)


def arrays_of(step_directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint's agent, by name."""
    agent, _ = load_checkpoint_agent(step_directory)
    flat = jax.tree_util.tree_flatten_with_path(agent)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def metrics_of(directory: pathlib.Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is measured: times and memory."""
    measured = (TIMING, MEMORY)
    lines = read_json_lines(directory / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


def problems_in(directory: pathlib.Path) -> list[str]:
    """What `acrlpd runs verify` would report."""
    return [problem for part in parts_to_verify(directory) for problem in part.problems(lambda _: None)]


def assert_equal_arrays(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if found[name].tobytes() != expected[name].tobytes()]
    assert not different
