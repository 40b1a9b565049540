"""An agent as a policy for rollouts: environment observations in, action chunks in its units out.

Observations go through the transforms of the data, so that the policy sees in an environment what it saw
in training.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.agents import ACRLPDPi0Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.norm_stats import NormStats
from acrlpd.data.policy_transforms import create_policy_transforms, repack_structure
from acrlpd.data.transforms import DataDict, DataTransformFn, RepackTransform, compose
from acrlpd.envs.env import Columns, EnvSpec
from acrlpd.envs.errors import EnvError
from acrlpd.envs.rollouts import Chunks
from acrlpd.models.observation import Observation
from acrlpd.models.pi0_config import Pi0Config


@dataclasses.dataclass(frozen=True)
class AgentPolicy:
    """Best-of-N sampling of an agent. Use `dataclasses.replace` for another agent, N or noise.

    Replacing compiles nothing anew unless shapes or N change.
    """

    agent: ACRLPDPi0Agent
    inputs: DataTransformFn
    outputs: DataTransformFn
    default_prompt: str | None  # where the task of the environment is not used
    # Candidates per chunk; None: the agent's own number.
    num_samples: int | None = None
    use_ema: bool = True
    # Standard deviations of noise, for robustness: on the normalised state and, as a share of the whole
    # range, on pixels; on the normalised actions.
    observation_noise: float = 0.0
    action_noise: float = 0.0

    def __call__(self, observations: Columns, prompts: Sequence[str], seed: int) -> Chunks:
        noise = np.random.default_rng([seed, 1])
        data: DataDict = dict(observations)
        data["prompt"] = np.array([self.default_prompt or prompt for prompt in prompts])
        data = self.inputs(data)
        if self.observation_noise:
            data = _noisy(data, self.observation_noise, noise)
        result = _best_of_n(self.agent, seed, _observation(data), self.num_samples, self.use_ema)
        actions, q_values, index = jax.device_get(result)
        if self.action_noise:
            actions = actions + noise.normal(0.0, self.action_noise, actions.shape)
        outputs = self.outputs({"state": data["state"], "actions": actions})
        return Chunks(
            actions=np.asarray(outputs["actions"], np.float32),
            values={
                "q": np.take_along_axis(q_values, index[:, None], axis=1)[:, 0],
                "q_mean": q_values.mean(axis=1),
                "q_std": q_values.std(axis=1),
            },
        )


def create_agent_policy(
    agent: ACRLPDPi0Agent,
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
    _check_columns(spec, [*config.repack.state, *transforms.cameras.values()])
    if spec.action_dim != rl_config.qchunking.action_dim:
        raise EnvError(
            f"environment {spec.name!r} has {spec.action_dim} action dims, the config's qchunking.action_dim is "
            f"{rl_config.qchunking.action_dim}"
        )
    return AgentPolicy(
        agent,
        inputs=compose([RepackTransform(structure), transforms.serving_inputs(norm_stats)]),
        outputs=transforms.serving_outputs(norm_stats),
        default_prompt=None if config.prompt_from_task else config.default_prompt,
        **{"num_samples": rl_config.evaluation.best_of_n} | options,
    )


def policy_cameras(rl_config: RLTrainConfig) -> tuple[str, ...]:
    """The camera columns that the policy of a config looks at: those an environment has to render."""
    if not isinstance(rl_config.model, Pi0Config):
        return ()
    slots = rl_config.data.repack.cameras
    return tuple(slots[slot] for slot in rl_config.model.image_keys if slot in slots)


@partial(jax.jit, static_argnames=("num_samples", "use_ema"))
def _best_of_n(
    agent: ACRLPDPi0Agent, seed: int, observation: Observation, num_samples: int | None, use_ema: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = jax.random.key(jnp.asarray(seed, jnp.uint32))
    result = agent.best_of_n(rng, observation, num_samples=num_samples, use_ema=use_ema)
    return result.actions, result.q_values, result.index


def _observation(data: DataDict) -> Observation:
    return Observation(
        images=dict(data.get("image", {})),
        image_masks=dict(data.get("image_mask", {})),
        state=np.asarray(data["state"], np.float32),
        tokenized_prompt=data.get("tokenized_prompt"),
        tokenized_prompt_mask=data.get("tokenized_prompt_mask"),
    )


def _noisy(data: DataDict, level: float, rng: np.random.Generator) -> DataDict:
    state = data["state"] + rng.normal(0.0, level, data["state"].shape) * (data["state"] != 0)
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
            f"{', '.join(spec.features)}"
        )
