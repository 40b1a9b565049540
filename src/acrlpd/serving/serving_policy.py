"""From robots' observations to their action chunks: transforms, sampling in batches, and the way back."""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from acrlpd.choice import kind_name
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.transforms import DataTransformFn, create_policy_transforms
from acrlpd.models.observation import Observation
from acrlpd.policies.checkpoint import PolicyCheckpoint
from acrlpd.policies.served_model import Choice, ServedModel, choose_actions
from acrlpd.robots.base import DataDict
from acrlpd.serving.requests import (
    ObservationSpec,
    RequestError,
    RequestLimits,
    RequestOptions,
    create_observation_spec,
    split_options,
)

_seeds = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One client's request, ready to be put into a batch."""

    policy: "ServingPolicy"
    options: RequestOptions
    observation: Observation  # one sample: no batch axis
    noise: np.ndarray  # float32 [N, T, a]


@dataclasses.dataclass(frozen=True, eq=False)
class ServingPolicy:
    """One checkpoint with all that is needed to act."""

    model: ServedModel
    rl_config: RLTrainConfig
    inputs: DataTransformFn
    outputs: DataTransformFn
    spec: ObservationSpec
    limits: RequestLimits
    max_batch_size: int = 1
    step: int | None = None
    directory: pathlib.Path | None = None  # where it was read from

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes that are compiled: powers of two. Other batches are filled up to the next."""
        return tuple(2**i for i in range((self.max_batch_size - 1).bit_length() + 1))

    def prepare(self, message: Any, noise: np.ndarray | None = None) -> Request:
        """Checks a client's message and does all work that needs no device.

        `noise` [T, a] replaces that of the first candidate.
        """
        observation, options = split_options(message, self.limits)
        observation = self.spec.check(observation)
        try:
            data = self.inputs(observation)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RequestError(str(error.args[0]) if error.args else type(error).__name__) from error
        seed = next(_seeds) if options.seed is None else options.seed
        model = self.rl_config.model
        # Candidate i gets the same noise whatever N is.
        drawn = np.random.default_rng(seed).standard_normal(
            (self.limits.best_of_n, model.action_horizon, model.action_dim), np.float32
        )
        if noise is not None:
            drawn[0] = noise
        return Request(self, options, self._to_observation(data), drawn)

    def infer(self, requests: Sequence[Request]) -> list[dict[str, Any] | RequestError]:
        """Replies to requests that were prepared by this policy for the same number of steps.

        A reply that must not be sent is an error in its place; the others do not suffer.
        """
        start = time.perf_counter()
        size = next(size for size in self.batch_sizes if size >= len(requests))
        rows = [*requests, *[requests[-1]] * (size - len(requests))]
        choice = choose_actions(
            self.model,
            jax.tree.map(lambda *leaves: np.stack(leaves), *(row.observation for row in rows)),
            np.stack([row.noise for row in rows]),
            np.array([row.options.best_of_n for row in rows], np.int32),
            num_steps=requests[0].options.num_steps,
        )
        if not any(request.options.return_candidates for request in requests):
            choice = choice.replace(candidates=None)
        choice = jax.device_get(choice)  # waits until the device is done
        infer_ms = 1000 * (time.perf_counter() - start)
        return [self._reply(request, choice, row, infer_ms) for row, request in enumerate(requests)]

    def warm_up(self) -> None:
        """Compiles everything that a request can ask for."""
        observation = self._example()
        noise_shape = (self.limits.best_of_n, self.rl_config.model.action_horizon, self.rl_config.model.action_dim)
        for num_steps in self.limits.num_steps:
            options = RequestOptions(self.limits.best_of_n, num_steps, None, return_candidates=False)
            request = Request(self, options, observation, np.zeros(noise_shape, np.float32))
            for size in self.batch_sizes:
                self.infer([request] * size)

    def metadata(self) -> dict[str, Any]:
        """What a client is told when it connects."""
        model, data, env = self.rl_config.model, self.rl_config.data, self.rl_config.env
        reset_pose = self.rl_config.openpi_compatibility.reset_pose
        return {
            # As openpi's server tells it: a client that finds none uses its own.
            **({} if reset_pose is None else {"reset_pose": list(reset_pose)}),
            "config": self.rl_config.name,
            "robot": kind_name(data.robot),
            "checkpoint_step": self.step,
            "action_horizon": model.action_horizon,
            # How it was judged in training: steps of a chunk that were executed, and pictures in that environment.
            "replan_steps": env.replan_steps or self.rl_config.qchunking.horizon_length,
            "image_size": None if env.id is None else list(env.image_size),
            # The only prompt it has read, if there was only one: a client that sends none gets it.
            "prompt": None if data.prompt_from_task else data.default_prompt,
            "best_of_n": self.limits.best_of_n,
            "num_steps": list(self.limits.num_steps),
            "has_critics": self.limits.has_critics,
            "observation": [*self.spec.states, *("/".join(path) for path in self.spec.cameras)],
        }

    def _reply(self, request: Request, choice: Choice, row: int, infer_ms: float) -> dict[str, Any] | RequestError:
        state = request.observation.state
        actions = self.outputs({"state": state, "actions": choice.actions[row]})["actions"]
        if not np.isfinite(actions).all():
            return RequestError("the policy's actions are not finite numbers; they were not sent")
        reply: dict[str, Any] = {"actions": actions, "policy_timing": {"infer_ms": infer_ms}}
        n = request.options.best_of_n
        reply["best_of_n"] = {"n": n, "index": int(choice.index[row])}
        if choice.q_values is not None:
            # Lists, not arrays: openpi's ActionChunkBroker cuts every array of a reply along its first axis.
            q_values = choice.q_values[row, :n]
            if not np.isfinite(q_values).all():
                return RequestError("the critics' values are not finite numbers: there is no best action to send")
            reply["best_of_n"] |= {
                "q_value": float(q_values[choice.index[row]]),
                "q_values": q_values.tolist(),
                "q_std": float(q_values.std()),
            }
        if request.options.return_candidates:
            reply["candidates"] = [
                self.outputs({"state": state, "actions": candidate})["actions"]
                for candidate in choice.candidates[row, :n]
            ]
        if self.step is not None:
            reply["checkpoint_step"] = self.step
        return reply

    def _to_observation(self, data: DataDict) -> Observation:
        model = self.rl_config.model
        tokens, mask = data.get("tokenized_prompt"), data.get("tokenized_prompt_mask")
        if model.image_keys and "image" not in data:
            raise RequestError("the observation has no image")
        return Observation(
            images=dict(data.get("image", {})),
            image_masks=dict(data.get("image_mask", {})),
            state=np.asarray(data["state"], np.float32),
            tokenized_prompt=tokens,
            tokenized_prompt_mask=mask,
        )

    def _example(self) -> Observation:
        """Ones in the shapes and dtypes of prepared observations."""
        spec = self.rl_config.model.inputs_spec(1)[0]
        example = jax.tree.map(lambda x: np.ones(x.shape[1:], x.dtype), spec)
        images = {key: np.ones(image.shape, np.uint8) for key, image in example.images.items()}
        return example.replace(images=images)


def create_serving_policy(
    model: ServedModel,
    rl_config: RLTrainConfig,
    norm_stats: Mapping[str, NormStats] | None,
    *,
    best_of_n: int,
    num_steps: Sequence[int],
    max_batch_size: int = 1,
    step: int | None = None,
    directory: pathlib.Path | None = None,
) -> ServingPolicy:
    """The policy of a model; without critics it takes the first candidate, so `best_of_n` must be 1."""
    limits = RequestLimits(best_of_n, tuple(dict.fromkeys(num_steps)), has_critics=model.critics is not None)
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1; found {max_batch_size}")
    transforms = create_policy_transforms(rl_config, long_prompts="refuse")
    return ServingPolicy(
        model,
        rl_config,
        inputs=transforms.serving_inputs(norm_stats),
        outputs=transforms.serving_outputs(norm_stats),
        spec=create_observation_spec(rl_config, transforms, norm_stats),
        limits=limits,
        max_batch_size=max_batch_size,
        step=step,
        directory=directory,
    )


def load_serving_policy(
    checkpoint: PolicyCheckpoint,
    *,
    best_of_n: int | None = None,
    num_steps: Sequence[int] = (),
    max_batch_size: int = 1,
) -> ServingPolicy:
    """Reads a checkpoint. Parameters are in the model's compute precision, as openpi serves them."""
    # What cannot be is refused before gigabytes are read.
    norm_stats = checkpoint.load_norm_stats()
    limits = RequestLimits(
        checkpoint.level.best_of_n if best_of_n is None else best_of_n,
        tuple(num_steps) or (checkpoint.level.num_steps,),
        has_critics=checkpoint.has_critics,
    )
    return create_serving_policy(
        checkpoint.load_model(dtype=checkpoint.rl_config.model.dtype),
        checkpoint.rl_config,
        norm_stats,
        best_of_n=limits.best_of_n,
        num_steps=limits.num_steps,
        max_batch_size=max_batch_size,
        step=checkpoint.step,
        directory=checkpoint.directory,
    )
