"""How much processor time an update takes, as a multiple of a fixed workload that runs in between.

Processor time counts all threads of the process, and waiting for a busy core does not count. What remains of the load
of a machine (clock rate, caches, shared cores) hits the updates and the workload alike, and their ratio hardly moves.
"""

import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.training.options import RunOptions
from acrlpd.training.train_runs import train_runs

# Stretches of updates between two workloads. The first stretch warms up and does not count.
_NUM_STRETCHES = 10
# Operations of a stretch. A core takes some tenths of a second for them: long against the resolution of the clock and
# what happens once in a stretch, and short against changes of the load.
_STRETCH_FLOPS = 3e9
# The updates of the smallest networks take longer than their operations.
_MOST_UPDATES = 150
# Products of the workload. The small ones cost as much for their calls as for their arithmetic, as those of small
# networks do.
_LARGE, _SMALL, _REPETITIONS = 256, 64, 150


def measure_update_cost(rl_config: RLTrainConfig, directory: pathlib.Path, update_flops: float) -> list[float]:
    """Processor time of an update in workloads, once for each stretch of the trainer's own loop.

    The run is that of the config without an environment: its train step is then the program that this process has
    compiled already. `update_flops` are the operations of an update.
    """
    updates = min(_MOST_UPDATES, max(1, round(_STRETCH_FLOPS / update_flops)))
    changes = {
        "training.offline_steps": _NUM_STRETCHES * updates,
        "training.online_steps": 0,
        "training.eval_frequency": updates,
        "training.log_frequency": updates,
        "training.save_frequency": _NUM_STRETCHES * updates,
        "checkpoints.keep_best": False,
        "data.validation_share": 0.0,
        "env.id": None,
    }
    timer = _Timer(create_workload(), updates)
    train_runs([apply_config_overrides(rl_config, changes)], [directory], RunOptions(), eval_fn=timer)
    return timer.ratios[1:]


def create_workload() -> Callable[[], object]:
    """A computation that never changes with this project, on the same devices and threads as the updates."""
    large = jax.random.normal(jax.random.key(0), (_LARGE, _LARGE)) / _LARGE**0.5
    small = jax.random.normal(jax.random.key(1), (_SMALL, _SMALL)) / _SMALL**0.5

    @jax.jit
    def compute(large: jax.Array, small: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, y = carry
            for _ in range(8):
                y = jnp.tanh(y @ small)
            return jnp.tanh(x @ large), y

        return jax.lax.fori_loop(0, _REPETITIONS, body, (large, small))

    jax.block_until_ready(compute(large, small))  # compiles
    return lambda: jax.block_until_ready(compute(large, small))


class _Timer:
    """Takes the place of an evaluation: the trainer calls it after each stretch, when all updates have finished."""

    def __init__(self, workload: Callable[[], object], updates: int) -> None:
        self.ratios: list[float] = []
        self._workload, self._updates = workload, updates
        self._start, self._workload_s = 0.0, self._time_workload()

    def __call__(self, agent: Agent, step: int) -> dict[str, float]:
        stretch_s, before = time.process_time() - self._start, self._workload_s
        self._workload_s = self._time_workload()
        self.ratios.append(stretch_s / self._updates / ((before + self._workload_s) / 2))
        self._start = time.process_time()
        return {}

    def _time_workload(self) -> float:
        start = time.process_time()
        self._workload()
        return time.process_time() - start
