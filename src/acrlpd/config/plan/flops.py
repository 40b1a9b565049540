"""Floating-point operations of one sample, counted: a matrix product of m x k by k x n is 2 m k n.

Norms, activations and softmax are left out; they are memory traffic, not arithmetic.
"""

import dataclasses
import itertools

from acrlpd.choice import kind_name
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import GemmaConfig, Pi0Config, SiglipConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig


@dataclasses.dataclass(frozen=True)
class PolicyFlops:
    """Forward passes of the policy for one sample."""

    images: float  # SigLIP over all cameras
    language: float  # the first expert over the prefix, and pi0's state token
    velocity: float  # one evaluation of the flow for one chunk
    attention: float  # the part of images + language that "dots" rematerialisation computes again

    @property
    def prefix(self) -> float:
        return self.images + self.language

    @property
    def forward(self) -> float:
        """What behaviour cloning computes forward: the prefix once, the flow once."""
        return self.prefix + self.velocity


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """One sample's share of one update."""

    forward: float  # of the policy, once
    train: float  # forward and backward of the policy as if everything were trained and nothing recomputed
    candidate: float  # one more candidate for one observation
    backward: float  # what is differentiated, its forward included
    recompute: float  # rematerialisation
    no_gradient: float  # prefixes without gradient: of the next observation, and of weights under accumulation
    candidates: float  # all candidates, at the observation and at the next one
    critics: float

    @property
    def dense(self) -> float:
        """Large matrix products."""
        return self.backward + self.recompute + self.no_gradient

    @property
    def total(self) -> float:
        return self.dense + self.candidates + self.critics


def policy_flops(model: Pi0Config | StateFlowPolicyConfig) -> PolicyFlops:
    if isinstance(model, StateFlowPolicyConfig):
        chunk = model.action_horizon * model.action_dim
        dims = model.hidden_dims
        layers = sum(a * b for a, b in itertools.pairwise(dims))
        velocity = 2.0 * ((model.state_dim + chunk + 1) * dims[0] + layers + dims[-1] * chunk)
        return PolicyFlops(0.0, 0.0, velocity, 0.0)
    tokens = len(model.image_keys) * model.tokens_per_image + model.prompt_len
    images = len(model.image_keys) * _siglip(model.siglip, model.tokens_per_image, model.paligemma.width)
    language = _expert(model.paligemma, tokens, tokens)
    context = tokens
    width, action_dim = model.action_expert.width, model.action_dim
    if not model.pi05:
        context += 1
        language += _expert(model.action_expert, 1, context) + 2.0 * action_dim * width
    horizon = model.action_horizon
    velocity = _expert(model.action_expert, horizon, context + horizon)
    velocity += 2.0 * horizon * 2 * action_dim * width  # in and out
    if model.pi05:  # time MLP, and the modulation of every norm
        velocity += 2.0 * (2 * width**2 + (2 * model.action_expert.depth + 1) * 3 * width**2)
    else:
        velocity += 2.0 * horizon * 3 * width**2
    attention = _attention(model.paligemma, tokens, tokens)
    attention += len(model.image_keys) * _siglip_attention(model.siglip, model.tokens_per_image)
    return PolicyFlops(images, language, velocity, attention)


def step_flops(config: RLTrainConfig) -> StepFlops:
    """One sample's share of an update, as the agent computes it."""
    hp, model = config.acrlpd, config.model
    policy = policy_flops(model)
    candidate = hp.sampling_steps * policy.velocity
    trains = hp.loss_weights.actor_weight > 0 or hp.loss_weights.bc_weight > 0
    has_actor = hp.loss_weights.actor_weight > 0
    needs_advantage = hp.bc_importance_weighting or (has_actor and kind_name(config.improvement) == "awr")

    factors = _gradient_factors(config, policy)
    image_factor, language_factor, velocity_factor = factors if trains else (0.0, 0.0, 0.0)
    velocities = 1.0 + (has_actor and kind_name(config.improvement) == "best_of_n")
    denoised = hp.sampling_steps if has_actor and kind_name(config.improvement) == "policy_gradient" else 0
    backward = (1 + image_factor) * policy.images + (1 + language_factor) * policy.language
    backward += (1 + velocity_factor) * (velocities + denoised) * policy.velocity

    recompute = denoised * policy.velocity
    remat = getattr(model, "remat_policy", "none")
    if trains and remat == "full":
        recompute += policy.images * (image_factor > 0) + policy.language * (language_factor > 0)
        recompute += velocities * policy.velocity
    elif trains and remat == "dots" and language_factor > 0:
        recompute += policy.attention

    at_observation = hp.num_action_samples * (
        needs_advantage or (has_actor and kind_name(config.improvement) == "best_of_n")
    )
    no_gradient = policy.prefix
    if config.training.gradient_accumulation_steps > 1 and (needs_advantage or hp.bc_difficulty_weighting):
        no_gradient += policy.forward
    return StepFlops(
        forward=policy.forward,
        train=3 * policy.forward,
        candidate=candidate,
        backward=backward,
        recompute=recompute,
        no_gradient=no_gradient,
        candidates=(hp.num_action_samples + at_observation) * candidate,
        critics=_critic_flops(config, at_observation),
    )


def _gradient_factors(config: RLTrainConfig, policy: PolicyFlops) -> tuple[float, float, float]:
    """Backward over forward for images, language and velocity.

    2 where weights are trained (gradients of weights and of inputs), 1 for frozen weights behind which
    something is trained (gradients of inputs alone), 0 where nothing is.
    """
    model = config.model
    if isinstance(model, StateFlowPolicyConfig):
        return 2.0, 2.0, 2.0
    velocity, language = 2.0, 2.0
    if model.action_expert.lora:
        velocity -= _expert_weights(model.action_expert, model.action_horizon) / policy.velocity
    if config.freeze_pi0_backbone:
        return 0.0, 0.0, velocity
    if model.paligemma.lora:
        tokens = len(model.image_keys) * model.tokens_per_image + model.prompt_len
        language -= _expert_weights(model.paligemma, tokens) / policy.language
    return 2.0, language, velocity


def _critic_flops(config: RLTrainConfig, at_observation: int) -> float:
    """Candidates are judged at both observations, the logged chunk is trained on, the best is judged again."""
    critic, chunk = config.critic, config.qchunking
    dims = critic.hidden_dims
    model = config.model
    features = model.paligemma.width if isinstance(model, Pi0Config) and critic.use_pi0_features else 0
    state = model.action_dim if isinstance(model, Pi0Config) else model.state_dim
    observation = (features + state) * dims[0]
    if features and critic.feature_fusion_method != "concat":
        observation += dims[0] ** 2
    actions = (chunk.critic_action_horizon or chunk.horizon_length) * chunk.action_dim
    layers = actions * dims[0] + sum(a * b for a, b in itertools.pairwise(dims)) + dims[-1]
    chunks = 3 + config.acrlpd.num_action_samples + at_observation + (1 if at_observation else 0) + 1
    observations = 3 + 1 + 1 + (1 if at_observation else 0)
    return 2.0 * critic.num_critics * (observations * observation + chunks * layers)


def _expert(config: GemmaConfig, tokens: int, keys: int) -> float:
    """All layers of one expert over `tokens` that attend to `keys`."""
    flops = _expert_weights(config, tokens) + _attention(config, tokens, keys)
    if config.lora is not None:  # queries, keys and values, attention output, feed-forward
        width, head_dim, heads = config.width, config.head_dim, config.num_heads
        adapters = (heads + 2 * config.num_kv_heads) * (width + head_dim) + heads * head_dim + width
        adapters += 3 * (width + config.mlp_dim)
        flops += 2.0 * config.depth * tokens * config.lora.rank * adapters
    return flops


def _expert_weights(config: GemmaConfig, tokens: int) -> float:
    """The part of `_expert` that LoRA freezes."""
    attention_dim = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return 2.0 * config.depth * tokens * config.width * (attention_dim + 3 * config.mlp_dim)


def _attention(config: GemmaConfig, tokens: int, keys: int) -> float:
    return 4.0 * config.depth * tokens * keys * config.num_heads * config.head_dim


def _siglip(config: SiglipConfig, tokens: int, out_dim: int) -> float:
    """One image."""
    weights = config.depth * (4 * config.width**2 + 2 * config.width * config.mlp_dim)
    weights += config.patch_size**2 * 3 * config.width + config.width * out_dim
    return 2.0 * tokens * weights + _siglip_attention(config, tokens)


def _siglip_attention(config: SiglipConfig, tokens: int) -> float:
    return 4.0 * config.depth * tokens**2 * config.width
