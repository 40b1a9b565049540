"""An agent as a policy for rollouts: environment observations in, action chunks in its units out.

Observations go through the transforms of the data, so that the policy sees in an environment what it saw
in training.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.transforms import (
    DataTransformFn,
    Normalize,
    RepackTransform,
    compose,
    create_policy_transforms,
    repack_structure,
)
from acrlpd.envs.env import RENAME, Columns, EnvError, EnvSpec
from acrlpd.envs.rollouts import Chunks
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.observation import Observation
from acrlpd.robots.base import DataDict


@dataclasses.dataclass(frozen=True)
class AgentPolicy:
    """Best-of-N sampling of an agent. Use `dataclasses.replace` for another agent, N or noise.

    Replacing compiles nothing anew unless shapes or N change.
    """

    agent: Agent
    normalize: DataTransformFn  # columns to normalised state and images
    model_inputs: DataTransformFn  # from there to what the model eats
    outputs: DataTransformFn
    prompt_from_task: bool
    default_prompt: str | None
    # Candidates per chunk; None: the agent's own number.
    num_samples: int | None = None
    use_ema: bool = True
    # Standard deviations of noise, for robustness: on the normalised state and, as a share of the whole
    # range, on pixels; on the normalised actions.
    observation_noise: float = 0.0
    action_noise: float = 0.0

    def __call__(self, observations: Columns, prompts: Sequence[str], seed: int) -> Chunks:
        noise = np.random.default_rng([seed, 1])
        data = self.normalize({**observations, "prompt": np.array([self._prompt(p) for p in prompts])})
        if self.observation_noise:
            data = _noisy(data, self.observation_noise, noise)
        data = self.model_inputs(data)
        actions, values = jax.device_get(
            _best_of_n(self.agent, np.uint32(seed), _observation(data), self.num_samples, self.use_ema)
        )
        if self.action_noise:
            actions = actions + noise.normal(0.0, self.action_noise, actions.shape)
        outputs = self.outputs({"state": data["state"], "actions": actions})
        return Chunks(np.asarray(outputs["actions"], np.float32), values)

    def _prompt(self, task: str) -> str:
        """The environment's task where the data's was used, as in training."""
        prompt = (task if self.prompt_from_task else "") or self.default_prompt
        if prompt is None:
            raise EnvError("the environment has no task to make a prompt from; set data.default_prompt")
        return prompt


def create_agent_policy(
    agent: Agent,
    rl_config: RLTrainConfig,
    norm_stats: Mapping[str, NormStats] | None,
    spec: EnvSpec,
    **options: Any,
) -> AgentPolicy:
    """The policy of a config's agent in the environment `spec`; `options` are fields of `AgentPolicy`."""
    config = rl_config.data
    transforms = create_policy_transforms(rl_config)
    structure = repack_structure(config, transforms.cameras)
    structure.pop("actions")
    check_environment(rl_config, norm_stats, spec)
    normalize = Normalize(norm_stats, use_quantiles=transforms.use_quantile_norm)
    options.setdefault("use_ema", rl_config.openpi_compatibility.enable_ema_for_inference)
    return AgentPolicy(
        agent,
        normalize=compose([RepackTransform(structure), *transforms.data.inputs, normalize]),
        model_inputs=compose(transforms.model.inputs),
        outputs=transforms.serving_outputs(norm_stats),
        prompt_from_task=config.prompt_from_task,
        default_prompt=config.default_prompt,
        **options,
    )


def check_environment(rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None, spec: EnvSpec) -> None:
    """Refuses an environment that a config's policy cannot act in; no agent is needed to know."""
    _check_columns(spec, [*rl_config.data.repack.state, *policy_cameras(rl_config)])
    if spec.action_dim != rl_config.qchunking.action_dim:
        raise EnvError(
            f"environment {spec.name!r} has {spec.action_dim} action dims, the config's qchunking.action_dim is "
            f"{rl_config.qchunking.action_dim}"
        )
    _check_state_width(spec, rl_config, norm_stats)


def policy_cameras(rl_config: RLTrainConfig) -> tuple[str, ...]:
    """The camera columns that the policy of a config looks at: those an environment has to render."""
    if not isinstance(rl_config.model, Pi0Config):
        return ()
    slots = rl_config.data.repack.cameras
    return tuple(slots[slot] for slot in rl_config.model.image_keys if slot in slots)


@partial(jax.jit, static_argnames=("num_samples", "use_ema"))
def _best_of_n(
    agent: Agent, seed: jax.Array, observation: Observation, num_samples: int | None, use_ema: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Chosen chunks [n, T, a], and numbers [n] about the choice: for calibration, traces and best-of-N's worth."""
    result = agent.best_of_n(jax.random.key(seed), observation, num_samples=num_samples, use_ema=use_ema)
    chosen = jnp.take_along_axis(result.q_values, result.index[:, None], axis=1)[:, 0]
    values = {
        "q": chosen,
        "q_mean": jnp.mean(result.q_values, axis=1),
        "q_std": jnp.std(result.q_values, axis=1),
        "q_min": jnp.min(result.q_values, axis=1),
        "q_max": jnp.max(result.q_values, axis=1),
        "action_std": jnp.mean(jnp.std(result.candidates, axis=1), axis=(1, 2)),
    }
    return result.actions, values


def _observation(data: DataDict) -> Observation:
    return Observation(
        images=dict(data.get("image", {})),
        image_masks=dict(data.get("image_mask", {})),
        state=np.asarray(data["state"], np.float32),
        tokenized_prompt=data.get("tokenized_prompt"),
        tokenized_prompt_mask=data.get("tokenized_prompt_mask"),
    )


def _noisy(data: DataDict, level: float, rng: np.random.Generator) -> DataDict:
    state = data["state"] + rng.normal(0.0, level, np.shape(data["state"]))
    images = {
        key: np.clip(image + rng.normal(0.0, 255 * level, image.shape), 0, 255).astype(np.uint8)
        for key, image in data.get("image", {}).items()
    }
    return {**data, "state": state} | ({"image": images} if images else {})


def _check_columns(spec: EnvSpec, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in spec.features]
    if missing:
        raise EnvError(
            f"data.repack names {missing[0]!r}, which environment {spec.name!r} does not give; it gives "
            f"{', '.join(spec.features)}. {RENAME}"
        )


def _check_state_width(spec: EnvSpec, rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None) -> None:
    """Refuses states of other dims than the policy's data had: a shorter one would be padded and mean nothing."""
    if norm_stats is None or "state" not in norm_stats:
        return
    stats, columns = norm_stats["state"], rl_config.data.repack.state
    found = sum(math.prod(spec.features[name].shape) for name in columns)
    if found not in stats.trained_dims(rl_config.model.action_dim):
        raise EnvError(
            f"environment {spec.name!r} gives a state of {found} dims ({', '.join(columns)}), the policy's norm "
            f"statistics have {stats.dim}: it was trained on another task or other columns"
        )
