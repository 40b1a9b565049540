"""Bytes per device of one update, and openpi's FSDP rule, by which arrays are split over devices.

The state (parameters, optimizers, moving average, critics) is read off the agent's own shapes with `jax.eval_shape`.
What an update needs for a while (activations, candidates) comes from the policy's family, per sample. An update has
two phases that do not overlap: candidates at the next observation, then the differentiated loss, inside which the
candidates at the observation are drawn while the activations are kept.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from acrlpd.agents.agent import Agent
from acrlpd.agents.best_of_n import group_size
from acrlpd.agents.critics.base import CriticEnsemble, ObservationReader
from acrlpd.config.create_agent import create_agent
from acrlpd.config.run import FSDPConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.base import WorkingMemory

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    critics: int  # online and target, networks of improvement and backup, optimizer, gradients
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


@functools.lru_cache(maxsize=32)
def estimate_memory(config: RLTrainConfig, num_devices: int = 1, *, on_cpu: bool = False) -> Memory:
    """Bytes per device of one update of this config.

    CPUs have no bfloat16 arithmetic. There XLA keeps activations, and copies of all bfloat16 weights, in float32.
    """
    agent = _trace_agent(config)

    def num_bytes(tree: Any) -> int:
        return sum(_bytes_per_device(array, config.fsdp) for array in jax.tree.leaves(tree))

    trainable, optimizer, ema = map(num_bytes, (agent.policy_params, agent.policy_opt_state, agent.ema_params))
    parameters = trainable + num_bytes(agent.frozen_params)
    learned_with_critics = (agent.critics.online, agent.improvement.params, agent.backup.params)
    accumulation = config.training.gradient_accumulation_steps
    samples = config.batch_size / num_devices / accumulation
    model = dataclasses.replace(config.model, dtype="float32") if on_cpu else config.model
    working = model.working_memory(freeze_pi0_backbone=config.freeze_pi0_backbone)
    weight_copies = working.weight_copies + (_float32_copies(agent.frozen_params) if on_cpu else 0)
    num_candidates = config.acrlpd.num_action_samples
    at_once = group_size(config.acrlpd.best_of_n, num_candidates, working.candidate * samples)
    judging = _judging_bytes(agent.critics.online_ensemble) * (num_candidates + 1)
    # A policy with nothing to train keeps nothing for a backward pass.
    kept, layer = (working.kept, working.layer) if trainable else (0.0, 0.0)
    reading = _reading_bytes(agent.critics.online_ensemble.reader, working)
    backward = kept + layer + 2 * working.context + reading
    candidates = kept + working.context + reading + max(at_once * working.candidate, working.encoding, judging)
    gathered = working.gathered_weights if config.fsdp.fsdp_devices > 1 else 0
    return Memory(
        parameters=parameters,
        # With micro-batches: the running sum, and the gradient of one micro-batch.
        gradients=trainable if accumulation == 1 else 2 * trainable,
        optimizer=optimizer,
        ema=ema,
        critics=num_bytes(agent) - parameters - optimizer - ema + num_bytes(learned_with_critics),
        activations=math.ceil(samples * backward) + weight_copies + gathered,
        candidates=math.ceil(samples * candidates) + weight_copies,
        batch=math.ceil(config.batch_size / num_devices * _batch_bytes(config)),
    )


def _float32_copies(params: Any) -> int:
    """Bytes of the bfloat16 arrays in float32."""
    return sum(array.size * _FLOAT32 for array in jax.tree.leaves(params) if array.dtype == jnp.bfloat16)


def checkpoint_bytes(config: RLTrainConfig) -> int:
    """Size of a checkpoint, which holds every array of the agent once, wherever its parts lie on devices."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(_trace_agent(config)))


def split_axis(shape: Sequence[int], itemsize: int, num_devices: int, min_size_mib: float) -> int | None:
    """The axis on which an array is split over `num_devices`; None: every device holds the whole array.

    Arrays of two or more axes and at least `min_size_mib` are split on their largest axis that the number of devices
    divides, on the last one if several axes are equally large.
    """
    if num_devices == 1 or len(shape) < 2 or math.prod(shape) * itemsize < min_size_mib * 2**20:
        return None
    axes = [axis for axis, length in enumerate(shape) if length and length % num_devices == 0]
    return max(axes, key=lambda axis: (shape[axis], axis), default=None)


def _bytes_per_device(array: jax.ShapeDtypeStruct, fsdp: FSDPConfig) -> int:
    size = array.size * array.dtype.itemsize
    axis = split_axis(array.shape, array.dtype.itemsize, fsdp.fsdp_devices, fsdp.min_size_mib)
    return size if axis is None else size // fsdp.fsdp_devices


def _reading_bytes(reader: ObservationReader, working: WorkingMemory) -> float:
    """One sample: the policy's tokens and standardised tokens, and the activations of the critics' own encoder."""
    tokens = 2 * working.features if reader.reads_features else 0.0
    return tokens + (0 if reader.images is None else reader.images.working_bytes)


def _judging_bytes(critics: CriticEnsemble) -> float:
    """One candidate of one sample: inputs, normalised values and outputs of the widest layer of all critics."""
    return 3.0 * critics.config.num_critics * critics.member_width * _FLOAT32


def _batch_bytes(config: RLTrainConfig) -> float:
    """One sample: both observations as they arrive and as floats, the chunk, and noise for all candidates."""
    model = config.model
    pixels = len(model.image_keys) * math.prod(model.image_resolution) * 3
    num_prompts = 3 if config.labels_prompts else 1  # without label, and with each of the two
    observation = pixels * (1 + _FLOAT32) + model.state_dim * _FLOAT32 + num_prompts * model.prompt_len * 5
    chunks = 3 + 2 * config.acrlpd.num_action_samples
    return 2 * observation + chunks * model.action_horizon * model.action_dim * _FLOAT32


def _trace_agent(config: RLTrainConfig) -> Agent:
    """The agent with shapes in place of arrays."""
    # Sections that do not change the shapes are fixed, so that one cached trace serves all batch sizes.
    return _trace_shapes(dataclasses.replace(config, batch_size=1, training=TrainingConfig(), fsdp=FSDPConfig()))


@functools.lru_cache(maxsize=32)
def _trace_shapes(config: RLTrainConfig) -> Agent:
    return jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))
