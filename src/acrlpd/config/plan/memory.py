"""Bytes per device of one update.

The state (parameters, optimizers, moving average, critics) is read off the agent's own shapes with `jax.eval_shape`.
What an update needs for a while (activations, candidates) comes from the policy's family, per sample. An update has
two phases that do not overlap: candidates at the next observation, then the differentiated loss, inside which the
candidates at the observation are drawn while the activations are kept.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from acrlpd.agents.best_of_n import group_size
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.fsdp import split_axis
from acrlpd.config.run import FSDPConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    critics: int  # online and target, optimizer, gradients
    activations: int  # kept for the backward pass, and its largest layer
    candidates: int  # contexts and denoising
    batch: int

    @property
    def state(self) -> int:
        """What a run holds between updates."""
        return self.parameters + self.optimizer + self.ema + self.critics

    @property
    def peak(self) -> int:
        """State, batch, and the phase that needs more."""
        return self.state + self.batch + max(self.gradients + self.activations, self.candidates)


def estimate_memory(config: RLTrainConfig, num_devices: int = 1) -> Memory:
    """Bytes per device of one update of this config."""
    state = _agent_arrays(config)

    def num_bytes(part: str) -> int:
        return sum(_bytes_per_device(array, config.fsdp) for array in state[part])

    trainable = num_bytes("policy_params")
    accumulation = config.training.gradient_accumulation_steps
    samples = config.batch_size / num_devices / accumulation
    working = config.model.working_memory(freeze_pi0_backbone=config.freeze_pi0_backbone)
    num_candidates = config.acrlpd.num_action_samples
    at_once = group_size(config.acrlpd.best_of_n, num_candidates, working.candidate * samples)
    judging = _judging_bytes(state["critics.online"]) * (num_candidates + 1)
    backward = working.kept + working.layer + 2 * working.context
    candidates = working.kept + working.context + max(at_once * working.candidate, working.encoding, judging)
    gathered = working.gathered_weights if config.fsdp.fsdp_devices > 1 else 0
    return Memory(
        parameters=trainable + num_bytes("frozen_params"),
        # With micro-batches: the running sum, and the gradient of one micro-batch.
        gradients=trainable if accumulation == 1 else 2 * trainable,
        optimizer=num_bytes("policy_opt_state"),
        ema=num_bytes("ema_params"),
        critics=num_bytes("rest") + num_bytes("critics.online"),
        activations=math.ceil(samples * backward) + working.weight_copies + gathered,
        candidates=math.ceil(samples * candidates) + working.weight_copies,
        batch=math.ceil(config.batch_size / num_devices * _batch_bytes(config)),
    )


class _Array(NamedTuple):
    shape: tuple[int, ...]
    itemsize: int


def _bytes_per_device(array: _Array, fsdp: FSDPConfig) -> int:
    size = math.prod(array.shape) * array.itemsize
    axis = split_axis(array.shape, array.itemsize, fsdp.fsdp_devices, fsdp.min_size_mib)
    return size if axis is None else size // fsdp.fsdp_devices


def _judging_bytes(critics: tuple[_Array, ...]) -> float:
    """One candidate of one sample: inputs, normalised values and outputs of the widest layer of all critics.

    Every array of the critics has the critics on its first axis; the last axis is the width of a layer.
    """
    widest = max((array.shape[0] * array.shape[-1] for array in critics if len(array.shape) > 1), default=0)
    return 3.0 * widest * _FLOAT32


def _batch_bytes(config: RLTrainConfig) -> float:
    """One sample: both observations as they arrive and as floats, the chunk, and noise for all candidates."""
    model = config.model
    pixels = len(model.image_keys) * math.prod(model.image_resolution) * 3
    observation = pixels * (1 + _FLOAT32) + model.state_dim * _FLOAT32 + model.prompt_len * 5
    chunks = 3 + 2 * config.acrlpd.num_action_samples
    return 2 * observation + chunks * model.action_horizon * model.action_dim * _FLOAT32


def _agent_arrays(config: RLTrainConfig) -> Mapping[str, tuple[_Array, ...]]:
    # Without what does not decide shapes, so that trying other batch sizes costs nothing.
    return _trace_agent(dataclasses.replace(config, batch_size=1, training=TrainingConfig(), fsdp=FSDPConfig()))


@functools.lru_cache(maxsize=32)
def _trace_agent(config: RLTrainConfig) -> Mapping[str, tuple[_Array, ...]]:
    """Every array of the agent by the field that holds it: the policy's fields by name, the others as "rest"."""
    agent = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))
    policy = ("policy_params", "frozen_params", "policy_opt_state", "ema_params")
    arrays: dict[str, tuple[_Array, ...]] = collections.defaultdict(tuple)
    for path, leaf in jax.tree_util.tree_flatten_with_path(agent)[0]:
        part = path[0].name if path[0].name in policy else "rest"
        arrays[part] += (_Array(leaf.shape, leaf.dtype.itemsize),)
    online = jax.tree.leaves(agent.critics.online)
    return arrays | {"critics.online": tuple(_Array(leaf.shape, leaf.dtype.itemsize) for leaf in online)}
