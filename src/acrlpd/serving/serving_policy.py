"""The policy behind the server: clients' messages in, replies out, several messages in one call."""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from acrlpd.choice import kind_name
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import ChosenActions, choose_actions
from acrlpd.policies.checkpoint import Checkpoint, load_policy
from acrlpd.policies.policy import Policy
from acrlpd.serving.requests import (
    ObservationSpec,
    RequestError,
    RequestOptions,
    create_observation_spec,
    split_options,
)

_seeds = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One client's request, ready for a batch."""

    policy: "ServingPolicy"
    options: RequestOptions
    observation: Observation  # one sample: no batch axis
    noise: np.ndarray  # float32 [N, T, a]


@dataclasses.dataclass(frozen=True, eq=False)
class ServingPolicy:
    """A policy with what clients may ask of it."""

    policy: Policy  # `policy.best_of_n` is the default number of candidates, and the most
    spec: ObservationSpec
    num_steps: tuple[int, ...]  # of denoising, the default first
    max_batch_size: int = 1
    step: int | None = None
    directory: pathlib.Path | None = None  # of the checkpoint

    @property
    def has_critics(self) -> bool:
        return self.policy.model.critics is not None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that are compiled: powers of two. Other batches are filled up to the next size."""
        return tuple(2**i for i in range((self.max_batch_size - 1).bit_length() + 1))

    def prepare(self, message: Any) -> Request:
        """Checks a client's message and does all work that needs no device."""
        data, options = split_options(
            message, most_candidates=self.policy.best_of_n, num_steps=self.num_steps, has_critics=self.has_critics
        )
        data = self.spec.check(data)
        try:
            observation = self.policy.observe(data)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RequestError(str(error.args[0]) if error.args else type(error).__name__) from error
        noise = self.policy.noise(next(_seeds) if options.seed is None else options.seed)
        return Request(self, options, observation, noise)

    def infer(self, requests: Sequence[Request]) -> list[dict[str, Any] | RequestError]:
        """Replies to requests that this policy prepared for the same number of steps.

        Where a reply must not be sent, an error takes its place; the other replies are not affected.
        """
        start = time.perf_counter()
        chosen = self._choose(requests)
        if not any(request.options.return_candidates for request in requests):
            chosen = chosen.replace(candidates=None)
        chosen = jax.device_get(chosen)  # waits until the device is done
        infer_ms = 1000 * (time.perf_counter() - start)
        return [self._reply(request, chosen, row, infer_ms) for row, request in enumerate(requests)]

    def _choose(self, requests: Sequence[Request]) -> ChosenActions:
        size = next(size for size in self.batch_sizes if size >= len(requests))
        rows = [*requests, *[requests[-1]] * (size - len(requests))]
        return choose_actions(
            self.policy.model,
            jax.tree.map(lambda *leaves: np.stack(leaves), *(row.observation for row in rows)),
            np.stack([row.noise for row in rows]),
            np.array([row.options.best_of_n for row in rows], np.int32),
            num_steps=requests[0].options.num_steps,
        )

    def warm_up(self) -> None:
        """Compiles everything that a request can ask for. The chunks of these examples are no chunks of a robot."""
        config = self.policy.rl_config
        fake = config.model.fake_obs(labelled_prompts=config.labels_prompts)
        observation = jax.tree.map(lambda x: np.asarray(x[0]), fake)
        images = {key: image.astype(np.uint8) for key, image in observation.images.items()}
        observation = observation.replace(images=images)
        for num_steps in self.num_steps:
            options = RequestOptions(self.policy.best_of_n, num_steps, None, return_candidates=False)
            request = Request(self, options, observation, self.policy.noise(0))
            for size in self.batch_sizes:
                jax.block_until_ready(self._choose([request] * size))

    def metadata(self) -> dict[str, Any]:
        """What a client is told when it connects."""
        rl_config = self.policy.rl_config
        data, env, reset_pose = rl_config.data, rl_config.env, rl_config.openpi_compatibility.reset_pose
        return {
            # As openpi's server does: a client that is told no pose uses its own.
            **({} if reset_pose is None else {"reset_pose": list(reset_pose)}),
            "config": rl_config.name,
            "robot": kind_name(data.robot),
            "checkpoint_step": self.step,
            "action_horizon": rl_config.model.action_horizon,
            # How the policy was judged in training: the steps of a chunk that were executed, and the size of images.
            "replan_steps": env.execution.for_horizon(rl_config.qchunking.chunk_length).replan_steps,
            "image_size": None if env.id is None else list(env.image_size),
            # The prompt of a policy that was trained with one only; a request without a prompt gets this one.
            "prompt": None if data.prompt_from_task else data.default_prompt,
            "best_of_n": self.policy.best_of_n,
            "num_steps": list(self.num_steps),
            "has_critics": self.has_critics,
            "observation": self.spec.required_keys,
        }

    def _reply(
        self, request: Request, chosen: ChosenActions, row: int, infer_ms: float
    ) -> dict[str, Any] | RequestError:
        state = request.observation.state
        actions = self.policy.outputs({"state": state, "actions": chosen.actions[row]})["actions"]
        if not np.isfinite(actions).all():
            return RequestError("the policy's actions are not finite numbers; they were not sent")
        reply: dict[str, Any] = {"actions": actions, "policy_timing": {"infer_ms": infer_ms}}
        n = request.options.best_of_n
        reply["best_of_n"] = {"n": n, "index": int(chosen.index[row])}
        if chosen.q_values is not None:
            # Lists, not arrays: openpi's ActionChunkBroker cuts every array of a reply along its first axis.
            q_values = chosen.q_values[row, :n]
            if not np.isfinite(q_values).all():
                return RequestError("the critics' values are not finite numbers: there is no best action to send")
            reply["best_of_n"] |= {
                "q_value": float(q_values[chosen.index[row]]),
                "q_values": q_values.tolist(),
                "q_std": float(q_values.std()),
            }
        if request.options.return_candidates:
            candidates = [
                self.policy.outputs({"state": state, "actions": candidate})["actions"]
                for candidate in chosen.candidates[row, :n]
            ]
            if not np.isfinite(candidates).all():
                return RequestError("the actions of a candidate are not finite numbers; they were not sent")
            reply["candidates"] = candidates
        if self.step is not None:
            reply["checkpoint_step"] = self.step
        return reply


def create_serving_policy(policy: Policy, num_steps: Sequence[int] = (), **options: Any) -> ServingPolicy:
    """A policy for a server; `options` are fields of `ServingPolicy`."""
    spec = create_observation_spec(policy.rl_config, policy.norm_stats)
    return ServingPolicy(policy, spec, tuple(dict.fromkeys(num_steps)) or (policy.num_steps,), **options)


def load_serving_policy(
    checkpoint: Checkpoint, *, best_of_n: int | None = None, num_steps: Sequence[int] = (), max_batch_size: int = 1
) -> ServingPolicy:
    """The policy of a checkpoint for a server. A prompt that is too long for the policy is refused, not cut."""
    return create_serving_policy(
        load_policy(checkpoint, best_of_n=best_of_n, long_prompts="refuse"),
        num_steps,
        max_batch_size=max_batch_size,
        step=checkpoint.step,
        directory=checkpoint.directory,
    )
