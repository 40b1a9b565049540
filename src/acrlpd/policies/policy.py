"""The policy that acts: observations in, action chunks in the robot's units out.

Evaluation, online rounds, the actor process and the server all act through `Policy`, so what is judged is what is
served. Observations go through the transforms of the training data, so the policy sees what it saw in training.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from acrlpd.agents.hyperparams import BestOfNConfig
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.rewards import RewardOrigin
from acrlpd.data.pipeline.tokenizer import LongPrompts
from acrlpd.data.pipeline.transforms import (
    DataTransformFn,
    Normalize,
    RepackTransform,
    compose,
    create_policy_transforms,
    to_observation,
)
from acrlpd.execution.base import Chunks, Columns
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import (
    ActingModel,
    ChosenActions,
    candidate_noise,
    choose_actions,
    choose_actions_of_models,
    stack_models,
)
from acrlpd.policies.levels import trained_level
from acrlpd.robots.base import DataDict


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A model with its transforms. Called with the columns of environments, it is a `ChunkPolicy`.

    Use `dataclasses.replace` for another model, number of candidates or noise. Replacing compiles nothing anew unless
    shapes, the number of candidates or the number of steps change.
    """

    model: ActingModel
    rl_config: RLTrainConfig
    norm_stats: Mapping[str, NormStats] | None
    repack: DataTransformFn  # columns of a dataset or an environment to what a robot sends
    normalize: DataTransformFn  # what a robot sends to normalised state and images
    model_inputs: DataTransformFn  # normalised state and images to what the model reads
    outputs: DataTransformFn  # the model's state and actions to the robot's actions
    best_of_n: int  # candidates per chunk
    num_steps: int  # denoising steps
    exploration: BestOfNConfig | None = None  # None: the best candidate is taken
    # Standard deviations of noise, for robustness. That of observations applies to the normalised state and, as a
    # share of the whole range, to pixels; that of actions applies to the normalised actions.
    observation_noise: float = 0.0
    action_noise: float = 0.0
    # Where the rewards of the training data came from, by which evaluations reward episodes; None where nobody knows.
    reward_origin: RewardOrigin | None = None
    # With a number S, `model` is S stacked models. A call has the same number of observations for each model, and the
    # observations of the first model come first. None: `model` is one model.
    num_models: int | None = None

    def __call__(self, observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        """Chunks for the columns [n, ...] and tasks [n] of environments; each observation has its own seed."""
        disturbances = [np.random.default_rng([seed, 1]) for seed in seeds]
        tasks = np.array([self._prompt(prompt) for prompt in prompts])
        observation = self.observe(self.repack({**observations, "prompt": tasks}), disturbances)
        choose = choose_actions if self.num_models is None else choose_actions_of_models
        chosen = jax.device_get(
            choose(
                self.model,
                observation,
                np.stack([self.noise(seed) for seed in seeds]),
                np.full(len(seeds), self.best_of_n, np.int32),
                None if self.exploration is None else np.array([seed % 2**32 for seed in seeds], np.uint32),
                num_steps=self.num_steps,
                exploration=self.exploration,
            )
        )
        actions = chosen.actions
        if self.action_noise:
            actions = actions + _normal(disturbances, self.action_noise, actions.shape[1:])
        outputs = self.outputs({"state": observation.state, "actions": actions})
        return Chunks(np.asarray(outputs["actions"], np.float32), _values(chosen), chosen.noise)

    def with_models(self, models: Mapping[int, ActingModel], num_models: int) -> "Policy":
        """This policy with the models of the runs 0 to `num_models` - 1, which act in one call.

        A run that rests has no model; any other model takes its place, and nobody looks at the result.
        """
        if num_models == 1:
            return dataclasses.replace(self, model=models[0], num_models=None)
        some_model = next(iter(models.values()))
        model = stack_models([models.get(i, some_model) for i in range(num_models)])
        return dataclasses.replace(self, model=model, num_models=num_models)

    def observe(self, data: DataDict, disturbances: Sequence[np.random.Generator] = ()) -> Observation:
        """What a robot sends, as the model reads it. Any leading axes are kept; `disturbances` [n] draw the noise."""
        data = self.normalize(data)
        if self.observation_noise:
            data = _noisy(data, self.observation_noise, disturbances)
        data = self.model_inputs(data)
        if self.rl_config.model.image_keys and "image" not in data:
            raise ValueError("the observation has no image")
        return to_observation(data)

    def noise(self, seed: int) -> np.ndarray:
        """The noise [N, T, a] of the candidates of one observation."""
        model = self.rl_config.model
        return candidate_noise(seed, self.best_of_n, model.action_horizon, model.action_dim)

    def _prompt(self, task: str) -> str:
        """The task of the environment where training read the tasks of the data, else the config's prompt."""
        config = self.rl_config.data
        prompt = (task if config.prompt_from_task else "") or config.default_prompt
        if prompt is None:
            raise ValueError("the environment has no task to make a prompt from; set data.default_prompt")
        return prompt


def create_policy(
    model: ActingModel,
    rl_config: RLTrainConfig,
    norm_stats: Mapping[str, NormStats] | None,
    *,
    best_of_n: int | None = None,
    explore: bool = False,
    long_prompts: LongPrompts = "cut",
) -> Policy:
    """The policy of a model.

    Candidates and denoising steps are by default those of the config's evaluations; without critics there is one
    candidate. With `explore` the candidate is drawn as acrlpd.best_of_n says. Environments have their prompts cut as
    in training; a server refuses prompts that the policy cannot read to their end.
    """
    level, has_critics = trained_level(rl_config), model.critics is not None
    if best_of_n is None:
        best_of_n = level.best_of_n if has_critics else 1
    if best_of_n > 1 and not has_critics:
        raise ValueError(
            f"best_of_n={best_of_n} needs critics to choose by, and this policy has none: its run did not train them "
            "(acrlpd.loss_weights.critic_weight 0), or the checkpoint does not hold them. Use best_of_n 1"
        )
    transforms = create_policy_transforms(rl_config, long_prompts=long_prompts)
    structure = {key: leaf for key, leaf in transforms.repack.structure.items() if key != "actions"}
    normalize = Normalize(norm_stats, use_quantiles=transforms.use_quantile_norm)
    selection = rl_config.acrlpd.best_of_n
    explores = explore and has_critics and (selection.top_k > 1 or selection.diversity_weight > 0)
    return Policy(
        model,
        rl_config,
        norm_stats,
        repack=RepackTransform(structure),
        normalize=compose([*transforms.data_inputs, normalize]),
        model_inputs=compose(transforms.model_inputs),
        outputs=transforms.serving_outputs(norm_stats),
        best_of_n=best_of_n,
        num_steps=level.num_steps,
        exploration=selection if explores else None,
    )


def _values(chosen: ChosenActions) -> dict[str, np.ndarray]:
    """Numbers [n] about the choice: for calibration, traces and the worth of best-of-N. Nothing without critics."""
    if chosen.q_values is None:
        return {}
    q_values, candidates = np.asarray(chosen.q_values), np.asarray(chosen.candidates)
    return {
        "q": q_values[np.arange(len(q_values)), chosen.index],
        "q_mean": q_values.mean(axis=1),
        "q_std": q_values.std(axis=1),
        "q_min": q_values.min(axis=1),
        "q_max": q_values.max(axis=1),
        "action_std": candidates.std(axis=1).mean(axis=(1, 2)),
    }


def _normal(rngs: Sequence[np.random.Generator], level: float, shape: Sequence[int]) -> np.ndarray:
    """Noise [n, *shape] of one generator per observation."""
    return np.stack([rng.normal(0.0, level, shape) for rng in rngs])


def _noisy(data: DataDict, level: float, rngs: Sequence[np.random.Generator]) -> DataDict:
    """Normalised data [n, ...] with noise on the state and on the pixels."""
    state = data["state"] + _normal(rngs, level, np.shape(data["state"])[1:])
    images = {
        key: np.clip(image + _normal(rngs, 255 * level, image.shape[1:]), 0, 255).astype(np.uint8)
        for key, image in data.get("image", {}).items()
    }
    return {**data, "state": state} | ({"image": images} if images else {})
