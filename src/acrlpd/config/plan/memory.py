"""Bytes per device of one update.

What stays (parameters, optimizer, EMA, critics) is read off the agent's own shapes with
`jax.eval_shape`; what comes and goes (activations, candidates) is counted per sample. An update has two
phases that do not overlap: candidates at the next observation, then the differentiated loss, inside
which the candidates at the observation are drawn while the activations are kept.
"""

import dataclasses
import functools
import math
from typing import Any

from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import GemmaConfig, Pi0Config, RematPolicy, SiglipConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

_FLOAT32 = 4
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


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
        """State and batch, and whichever phase needs more."""
        return self.state + self.batch + max(self.gradients + self.activations, self.candidates)


def estimate_memory(config: RLTrainConfig, num_devices: int = 1) -> Memory:
    """Bytes per device of one update of this config."""
    policy, critics = _state_leaves(config)
    shards = config.fsdp.fsdp_devices
    limit = config.fsdp.min_size_mib * 2**20
    bytes_of = functools.partial(_bytes_per_device, shards=shards, limit=limit)
    trainable = bytes_of(policy["trainable"])
    gradients = trainable
    if config.training.gradient_accumulation_steps > 1:
        gradients *= 2  # the running sum, and the micro-batch's own
    samples = config.batch_size / num_devices / config.training.gradient_accumulation_steps
    working = _Working.of(config, samples)
    copies = _compute_copies(config)
    return Memory(
        parameters=trainable + bytes_of(policy["frozen"]),
        gradients=gradients,
        optimizer=2 * trainable,
        ema=0 if config.acrlpd.ema_decay is None else trainable,
        critics=5 * bytes_of(critics),
        activations=math.ceil(samples * working.backward) + copies + _gathered_layers(config),
        candidates=math.ceil(samples * working.candidates) + copies,
        batch=math.ceil(config.batch_size / num_devices * _batch_bytes(config)),
    )


@dataclasses.dataclass(frozen=True)
class _Working:
    """Bytes per sample that come and go."""

    kept: float  # for the backward pass
    layer: float  # the largest layer's own, while it is differentiated
    context: float  # keys and values of one observation
    denoising: float  # all candidates that are denoised at once
    judging: float  # the critics on all candidates

    @property
    def backward(self) -> float:
        return self.kept + self.layer + 2 * self.context

    @property
    def candidates(self) -> float:
        return self.kept + self.context + max(self.denoising, self.judging)

    @classmethod
    def of(cls, config: RLTrainConfig, samples: float) -> "_Working":
        if isinstance(config.model, StateFlowPolicyConfig):
            return cls._of_state_policy(config, config.model)
        return cls._of_pi0(config, config.model, samples)

    @classmethod
    def _of_state_policy(cls, config: RLTrainConfig, model: StateFlowPolicyConfig) -> "_Working":
        c = _DTYPE_BYTES[model.dtype]
        widths = sum(model.hidden_dims)
        widest = max(model.hidden_dims)
        return cls(
            kept=2.0 * widths * c,
            layer=2.0 * widest * c,
            context=model.hidden_dims[0] * c,
            denoising=2.0 * config.acrlpd.num_action_samples * widest * c,
            judging=_judging(config),
        )

    @classmethod
    def _of_pi0(cls, config: RLTrainConfig, model: Pi0Config, samples: float) -> "_Working":
        c = _DTYPE_BYTES[model.dtype]
        first, second = model.paligemma, model.action_expert
        image_tokens = len(model.image_keys) * model.tokens_per_image
        prefix = image_tokens + model.prompt_len
        keys = prefix + (not model.pi05) + model.action_horizon
        images = _Layers.of_siglip(model.siglip, image_tokens, model.tokens_per_image, c)
        language = _Layers.of_gemma(first, prefix, prefix, c)
        suffix = _Layers.of_gemma(second, model.action_horizon, keys, c)
        trained = [suffix] if config.freeze_pi0_backbone else [images, language, suffix]
        at_once = _candidates_at_once(config, suffix.forward * samples)
        return cls(
            kept=sum(layers.kept(model.remat_policy) for layers in trained),
            layer=max(layers.backward for layers in trained),
            context=2.0 * first.depth * prefix * first.head_dim * c,
            denoising=max(at_once * suffix.forward, images.forward, language.forward),
            judging=_judging(config),
        )


@dataclasses.dataclass(frozen=True)
class _Layers:
    """A stack of transformer layers over the tokens of one sample; arrays of one layer, in bytes."""

    depth: int
    inputs: float
    norms: float  # the float32 inside of the norms
    projections: float  # queries, keys, values and the attention's output
    logits: float
    hidden: float  # before the activation; both halves of a gated one

    @classmethod
    def of_gemma(cls, config: GemmaConfig, tokens: int, keys: int, dtype_bytes: int) -> "_Layers":
        queries, width = config.num_heads * config.head_dim, config.width
        return cls(
            depth=config.depth,
            inputs=tokens * width * dtype_bytes,
            norms=4.0 * tokens * width * _FLOAT32,
            projections=tokens * (queries + 2 * config.num_kv_heads * config.head_dim + width) * dtype_bytes,
            logits=float(tokens * keys * config.num_heads * _FLOAT32),
            hidden=2.0 * tokens * config.mlp_dim * dtype_bytes,
        )

    @classmethod
    def of_siglip(cls, config: SiglipConfig, tokens: int, keys: int, dtype_bytes: int) -> "_Layers":
        return cls(
            depth=config.depth,
            inputs=tokens * config.width * dtype_bytes,
            norms=4.0 * tokens * config.width * _FLOAT32,
            projections=4.0 * tokens * config.width * dtype_bytes,
            logits=float(tokens * keys * config.num_heads * dtype_bytes),
            hidden=float(tokens * config.mlp_dim * dtype_bytes),
        )

    @property
    def forward(self) -> float:
        """Working memory of one layer: the wider of attention and feed-forward."""
        return max(2 * self.logits, 1.5 * self.hidden)

    @property
    def backward(self) -> float:
        """The same for its gradient: values and gradients side by side."""
        return max(4 * self.logits, 2 * self.hidden)

    def kept(self, remat_policy: RematPolicy) -> float:
        """Bytes kept for the backward pass: layer inputs, and what is not computed again."""
        per_layer = self.inputs
        if remat_policy != "full":
            per_layer += self.projections + self.hidden
        if remat_policy == "none":
            per_layer += self.norms + 3 * self.logits + 1.5 * self.hidden
        return self.depth * per_layer


def _judging(config: RLTrainConfig) -> float:
    """Inputs, normalised and outputs of the widest layer of every critic, for all candidates at once."""
    critic = config.critic
    candidates = config.acrlpd.num_action_samples + 1
    return 3.0 * critic.num_critics * candidates * max(critic.hidden_dims) * _FLOAT32


def _candidates_at_once(config: RLTrainConfig, bytes_per_candidate: float) -> int:
    n, best_of_n = config.acrlpd.num_action_samples, config.acrlpd.best_of_n
    if best_of_n.strategy == "parallel":
        return n
    if best_of_n.strategy == "sequential":
        return 1
    wanted = best_of_n.chunk_size
    if best_of_n.strategy == "auto":
        wanted = int(best_of_n.memory_limit_mib * 2**20 / bytes_per_candidate)
    return max(size for size in range(1, n + 1) if n % size == 0 and size <= max(wanted, 1))


def _batch_bytes(config: RLTrainConfig) -> float:
    """One sample: both observations as they arrive and as floats, the chunk and its noise."""
    model = config.model
    horizon, dim = model.action_horizon, model.action_dim
    candidates = 2 * config.acrlpd.num_action_samples
    chunks = (3 + candidates) * horizon * dim * _FLOAT32
    if isinstance(model, StateFlowPolicyConfig):
        return 2 * model.state_dim * _FLOAT32 + chunks
    pixels = len(model.image_keys) * math.prod(model.image_resolution) * 3
    return 2 * (pixels * (1 + _FLOAT32) + dim * _FLOAT32 + model.prompt_len * 5) + chunks


def _compute_copies(config: RLTrainConfig) -> int:
    """Denoising uses the action expert many times, so XLA keeps its float32 weights in bfloat16 as well."""
    model = config.model
    if isinstance(model, StateFlowPolicyConfig) or model.dtype == "float32":
        return 0
    return 2 * _layer_weights(model.action_expert) * model.action_expert.depth


def _gathered_layers(config: RLTrainConfig) -> int:
    """Under FSDP the largest layer's weights are whole while it runs, and the next one's on their way."""
    if config.fsdp.fsdp_devices == 1 or isinstance(config.model, StateFlowPolicyConfig):
        return 0
    return 2 * _layer_weights(config.model.paligemma) * _FLOAT32


def _layer_weights(config: GemmaConfig) -> int:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.width * (2 * queries + 2 * keys + 3 * config.mlp_dim)


def _bytes_per_device(leaves: tuple[tuple[tuple[int, ...], int], ...], shards: int, limit: float) -> int:
    """openpi's rule: arrays of two or more axes and at least `limit` bytes are split on a divisible axis."""
    total = 0
    for shape, itemsize in leaves:
        size = math.prod(shape) * itemsize
        split = len(shape) >= 2 and size >= limit and any(axis % shards == 0 for axis in shape)
        total += size // shards if split else size
    return total


def _state_leaves(config: RLTrainConfig) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """(shape, bytes per element) of every policy leaf, trainable and frozen, and of the online critics."""
    # Only what decides shapes, so that trying other batch sizes costs nothing.
    shapes = RLTrainConfig(
        name="shapes",
        model=dataclasses.replace(config.model, remat_policy="full")
        if isinstance(config.model, Pi0Config)
        else config.model,
        freeze_pi0_backbone=config.freeze_pi0_backbone,
        critic=config.critic,
        qchunking=config.qchunking,
    )
    return _trace_state(shapes)


@functools.lru_cache(maxsize=32)
def _trace_state(config: RLTrainConfig) -> tuple[dict[str, Any], tuple[Any, ...]]:
    import jax

    from acrlpd.config.create_agent import create_agent

    agent = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))

    def leaves(tree: Any) -> tuple[tuple[tuple[int, ...], int], ...]:
        return tuple((leaf.shape, leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))

    policy = {"trainable": leaves(agent.policy_params), "frozen": leaves(agent.frozen_params)}
    return policy, leaves(agent.critics.online)
