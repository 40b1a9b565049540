"""openpi's transform chain, on single samples and on whole batches alike, and the chain that a config makes.

A transform is a function from dict to dict. Every transform works on arrays with any leading axes (state [..., s],
actions [..., T, a], images [..., h, w, 3]), so the loader transforms a batch with a few numpy calls while a policy
server sends single observations through the same code.

Training applies repack -> data -> Normalize -> model. Serving leaves the repacking out, and undoes the rest in reverse
order on the outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from acrlpd.choice import kind_name
from acrlpd.config import DataConfig, RLTrainConfig, to_dict
from acrlpd.data.frames.store import resize_with_pad
from acrlpd.data.pipeline.action_tokens import ReportUndecodable, TokenizeActions
from acrlpd.data.pipeline.norm_stats import EPSILON, NormStats
from acrlpd.data.pipeline.tokenizer import LABELS, LongPrompts, Tokenizer, add_label, create_tokenizer
from acrlpd.models.observation import Observation
from acrlpd.robots.base import DataDict, make_bool_mask

DataTransformFn = Callable[[DataDict], DataDict]


def compose(transforms: Sequence[DataTransformFn]) -> DataTransformFn:
    """One transform that applies all of them in order."""

    def chain(data: DataDict) -> DataDict:
        for transform in transforms:
            data = transform(data)
        return data

    return chain


@dataclasses.dataclass(frozen=True)
class RepackTransform:
    """Renames a dataset's columns to what the robot's transforms expect.

    `structure` is the nested dict to make; a leaf names one column, or several that are concatenated
    along their last axis.
    """

    structure: Mapping[str, Any]

    def __call__(self, data: DataDict) -> DataDict:
        repacked = self._repack(self.structure, data)
        return {**repacked, "prompt": data["prompt"]} if "prompt" in data else repacked

    def _repack(self, node: Any, data: DataDict) -> Any:
        if isinstance(node, Mapping):
            return {key: self._repack(child, data) for key, child in node.items()}
        if isinstance(node, str):
            return _column(node, data)
        return np.concatenate([_column(name, data) for name in node], axis=-1)


def _column(name: str, data: DataDict) -> Any:
    if name not in data:
        known = ", ".join(sorted(data))
        raise KeyError(f"the repack transform asks for {name!r}; the data has: {known}. Correct data.repack")
    return data[name]


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Brings state and actions to about [-1, 1] by mean and deviation or by quantiles.

    Statistics of more dims than the data has are cut: released statistics are padded to the model's width.
    """

    norm_stats: Mapping[str, NormStats] | None
    use_quantiles: bool = False

    def __call__(self, data: DataDict) -> DataDict:
        if self.norm_stats is None:
            return data
        present = self.norm_stats.keys() & data.keys()
        return {**data, **{key: self._normalize(data[key], self.norm_stats[key]) for key in present}}

    def _normalize(self, x: np.ndarray, stats: NormStats) -> np.ndarray:
        dim = x.shape[-1]
        if self.use_quantiles:
            q01, q99 = (quantile[..., :dim] for quantile in stats.quantiles())
            return (x - q01) / (q99 - q01 + EPSILON) * 2.0 - 1.0
        return (x - stats.mean[..., :dim]) / (stats.std[..., :dim] + EPSILON)


@dataclasses.dataclass(frozen=True)
class Unnormalize:
    """Undoes `Normalize`; dims beyond the statistics (the padding) pass through unchanged."""

    norm_stats: Mapping[str, NormStats] | None
    use_quantiles: bool = False

    def __call__(self, data: DataDict) -> DataDict:
        if self.norm_stats is None:
            return data
        missing = [key for key in self.norm_stats if key not in data]
        if missing:
            raise KeyError(f"outputs lack {missing}, for which there are norm statistics; found {sorted(data)}")
        return {**data, **{key: self._unnormalize(data[key], s) for key, s in self.norm_stats.items()}}

    def _unnormalize(self, x: np.ndarray, stats: NormStats) -> np.ndarray:
        dim = min(x.shape[-1], stats.mean.shape[-1])
        known, rest = x[..., :dim], x[..., dim:]
        if self.use_quantiles:
            q01, q99 = (quantile[..., :dim] for quantile in stats.quantiles())
            known = (known + 1.0) / 2.0 * (q99 - q01 + EPSILON) + q01
        else:
            # openpi pads the deviation with 1, which scales padded dims by 1 + 1e-6.
            known = known * (stats.std[..., :dim] + EPSILON) + stats.mean[..., :dim]
            rest = rest * np.float64(1.0 + EPSILON)
        return np.concatenate([known, rest], axis=-1)


@dataclasses.dataclass(frozen=True)
class DeltaActions:
    """Makes the masked action dims relative to the state at the chunk's first step."""

    mask: tuple[bool, ...]

    def __call__(self, data: DataDict) -> DataDict:
        return _add_state(data, self.mask, sign=-1)


@dataclasses.dataclass(frozen=True)
class AbsoluteActions:
    """Undoes `DeltaActions`."""

    mask: tuple[bool, ...]

    def __call__(self, data: DataDict) -> DataDict:
        return _add_state(data, self.mask, sign=1)


def _add_state(data: DataDict, mask: tuple[bool, ...], *, sign: int) -> DataDict:
    """Adds the state, or subtracts it, in the action dims of the mask; a client's data has no actions."""
    if "actions" not in data:
        return data
    state, actions = np.asarray(data["state"]), data["actions"]
    if len(mask) > min(state.shape[-1], actions.shape[-1]):
        raise ValueError(
            f"the mask of relative actions has {len(mask)} dims, the state has {state.shape[-1]} and the actions "
            f"{actions.shape[-1]}; correct data.delta_action_mask"
        )
    offset = np.zeros((*state.shape[:-1], actions.shape[-1]), state.dtype)
    offset[..., : len(mask)] = np.where(mask, state[..., : len(mask)], 0)
    return {**data, "actions": actions + sign * offset[..., None, :]}


@dataclasses.dataclass(frozen=True)
class ResizeImages:
    """Keeps the cameras that the policy is given, and resizes them to its resolution, with black borders."""

    image_keys: tuple[str, ...]
    height: int
    width: int

    def __call__(self, data: DataDict) -> DataDict:
        if "image" not in data:
            return data
        images = {key: resize_with_pad(data["image"][key], self.height, self.width) for key in self.image_keys}
        return data | {"image": images, "image_mask": {key: data["image_mask"][key] for key in self.image_keys}}


@dataclasses.dataclass(frozen=True)
class TokenizePrompt:
    """Replaces the prompt by its tokens; with `discrete_state_input` the state is written into it (pi0.5).

    Data without a prompt gets the default prompt. Comes after normalisation (the state is binned over [-1, 1]) and
    before padding. With `labelled`, the prompt with each of the `LABELS` is tokenized as well; `fast` is pi0-FAST's
    format.
    """

    tokenizer: Tokenizer
    discrete_state_input: bool = False
    default_prompt: str | None = None
    labelled: bool = False
    fast: bool = False

    def __call__(self, data: DataDict) -> DataDict:
        prompt = data.get("prompt", self.default_prompt)
        if prompt is None:
            raise KeyError("there is no prompt: give the dataset a task, or set data.default_prompt")
        state = np.asarray(data["state"])
        batch_shape = state.shape[:-1]
        distinct, which = np.unique(np.broadcast_to(np.asarray(prompt), batch_shape).ravel(), return_inverse=True)
        states = state.reshape(-1, state.shape[-1]) if self.discrete_state_input else None
        tokens, mask = self._tokenize(distinct.tolist(), which, states)
        rest = {key: value for key, value in data.items() if key != "prompt"}
        rest["tokenized_prompt"] = tokens.reshape(*batch_shape, -1)
        rest["tokenized_prompt_mask"] = mask.reshape(*batch_shape, -1)
        if self.labelled:
            texts = [[add_label(text, label) for text in distinct.tolist()] for label in LABELS]
            labelled = [self._tokenize(text, which, states) for text in texts]
            tokens, mask = (np.stack(of_labels, axis=1) for of_labels in zip(*labelled, strict=True))
            rest["labelled_prompt"] = tokens.reshape(*batch_shape, len(LABELS), -1)
            rest["labelled_prompt_mask"] = mask.reshape(*batch_shape, len(LABELS), -1)
        return rest

    def _tokenize(
        self, distinct: list[str], which: np.ndarray, states: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and masks [n, l] of the prompts distinct[which], into which states [n, s] are written if given."""
        if states is not None:
            return self.tokenizer.tokenize([distinct[i] for i in which], states, fast=self.fast)
        tokens, mask = self.tokenizer.tokenize(distinct)  # a batch has few distinct prompts
        return tokens[which], mask[which]


@dataclasses.dataclass(frozen=True)
class PadStatesAndActions:
    """Pads state and actions with zeros to the model's width."""

    model_action_dim: int

    def __call__(self, data: DataDict) -> DataDict:
        return {**data, **{key: self._pad(key, data[key]) for key in data if key in ("state", "actions")}}

    def _pad(self, key: str, x: np.ndarray) -> np.ndarray:
        missing = self.model_action_dim - x.shape[-1]
        if missing < 0:
            raise ValueError(f"{key} has {x.shape[-1]} dims, more than the model's action_dim {self.model_action_dim}")
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def to_observation(data: DataDict) -> Observation:
    """What the policy reads, from data that has gone through all transforms."""
    return Observation(
        images=data.get("image", {}),
        image_masks=data.get("image_mask", {}),
        state=np.asarray(data["state"], np.float32),
        tokenized_prompt=data.get("tokenized_prompt"),
        tokenized_prompt_mask=data.get("tokenized_prompt_mask"),
        labelled_prompt=data.get("labelled_prompt"),
        labelled_prompt_mask=data.get("labelled_prompt_mask"),
        action_tokens=data.get("action_tokens"),
    )


@dataclasses.dataclass(frozen=True)
class PolicyTransforms:
    """Everything between a dataset (or a robot) and the policy."""

    repack: RepackTransform
    data_inputs: Sequence[DataTransformFn]
    data_outputs: Sequence[DataTransformFn]
    model_inputs: Sequence[DataTransformFn]
    use_quantile_norm: bool
    cameras: Mapping[str, str]  # the model's slot -> the dataset's camera, for cameras that the policy is given
    model_outputs: Sequence[DataTransformFn] = ()

    def training_inputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """Dataset columns to what the model eats."""
        return compose([self.repack, self.serving_inputs(norm_stats)])

    def serving_inputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """A robot's observation to what the model eats."""
        return compose([*self.data_inputs, self.model_inputs_with(norm_stats)])

    def model_inputs_with(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """What `create_statistics_transform` gives to what the model eats."""
        return compose([Normalize(norm_stats, use_quantiles=self.use_quantile_norm), *self.model_inputs])

    def serving_outputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """The model's {"state", "actions"} to a robot's {"actions"}; undoes the inputs."""
        unnormalize = Unnormalize(norm_stats, use_quantiles=self.use_quantile_norm)
        return compose([*self.model_outputs, unnormalize, *self.data_outputs])


def uses_quantiles(rl_config: RLTrainConfig) -> bool:
    """Whether values are normalised by quantiles: as the config says, or else as the policy wants it."""
    wanted = rl_config.data.use_quantile_norm
    return rl_config.model.use_quantile_norm if wanted is None else wanted


def create_policy_transforms(rl_config: RLTrainConfig, *, long_prompts: LongPrompts = "cut") -> PolicyTransforms:
    """The chain for a config: the robot's transforms, relative actions, and what the model needs.

    A prompt that is longer than the policy reads is cut with a warning, or refused with a ValueError.
    """
    config, model = rl_config.data, rl_config.model
    cameras = {slot: name for slot, name in config.repack.cameras.items() if slot in model.image_keys}
    data_inputs, data_outputs = _data_transforms(rl_config)
    return PolicyTransforms(
        repack=RepackTransform(config.robot.repack(config.repack.state, config.repack.actions, cameras)),
        data_inputs=data_inputs,
        data_outputs=data_outputs,
        model_inputs=_model_inputs(rl_config, long_prompts),
        use_quantile_norm=uses_quantiles(rl_config),
        cameras=cameras,
        model_outputs=[ReportUndecodable()] if model.samples_tokens else [],
    )


def create_statistics_transform(rl_config: RLTrainConfig) -> DataTransformFn:
    """What is done to the columns before norm statistics are taken; needs no camera and no tokenizer."""
    config, (data_inputs, _) = rl_config.data, _data_transforms(rl_config)
    return compose([RepackTransform(config.robot.repack(config.repack.state, config.repack.actions, {})), *data_inputs])


def describe_statistics_transform(config: DataConfig) -> dict[str, Any]:
    """All that `create_statistics_transform` depends on, as plain JSON; kept with norm statistics."""
    mask = delta_action_mask(config)
    return {
        "robot": kind_name(config.robot),
        **{f"robot.{name}": value for name, value in to_dict(config.robot).items()},
        "delta_action_mask": None if mask is None else list(mask),
        "state_columns": list(config.repack.state),
        "action_columns": list(config.repack.actions),
        "normalize": sorted(config.normalize),
    }


def delta_action_mask(config: DataConfig) -> tuple[bool, ...] | None:
    """Which action dims become relative to the state; None: all stay absolute."""
    if not config.use_delta_joint_actions:
        return None
    mask = known_delta_mask(config)
    if mask is None:
        raise ValueError(
            f"data.use_delta_joint_actions=true needs data.delta_action_mask for robot {kind_name(config.robot)}, for "
            "example (6, -1) for six relative joints and an absolute gripper"
        )
    return mask


def known_delta_mask(config: DataConfig) -> tuple[bool, ...] | None:
    """The action dims that would become relative: the config names them, or the robot has usual ones."""
    if config.delta_action_mask is not None:
        return make_bool_mask(*config.delta_action_mask)
    return config.robot.delta_action_mask


def _data_transforms(rl_config: RLTrainConfig) -> tuple[list[DataTransformFn], list[DataTransformFn]]:
    """The robot's inputs and outputs, and relative actions between them and the model."""
    robot, mask = rl_config.data.robot, delta_action_mask(rl_config.data)
    outputs = functools.partial(robot.outputs, action_dim=robot.action_dim or rl_config.qchunking.action_dim)
    if mask is None:
        return [robot.inputs], [outputs]
    return [robot.inputs, DeltaActions(mask)], [AbsoluteActions(mask), outputs]


def _model_inputs(rl_config: RLTrainConfig, long_prompts: LongPrompts) -> list[DataTransformFn]:
    config, model = rl_config.data, rl_config.model
    inputs: list[DataTransformFn] = [ResizeImages(model.image_keys, *model.image_resolution)]
    if model.prompt_len:
        tokenizer = create_tokenizer(config.tokenizer, model.prompt_len, long_prompts)
        if tokenizer.vocab_size > model.vocab_size:
            raise ValueError(
                f"data.tokenizer={config.tokenizer} has {tokenizer.vocab_size} ids, the model's vocab_size is "
                f"{model.vocab_size}; use data.tokenizer=byte for a small vocabulary"
            )
        labelled, action_tokens = rl_config.labels_prompts, create_action_tokens(rl_config)
        state_input, fast = bool(model.discrete_state_input), action_tokens is not None
        inputs.append(TokenizePrompt(tokenizer, state_input, config.default_prompt, labelled, fast))
        if action_tokens is not None:
            inputs.append(action_tokens)
    if model.pads_actions:
        inputs.append(PadStatesAndActions(model.action_dim))
    return inputs


def create_action_tokens(rl_config: RLTrainConfig) -> TokenizeActions | None:
    """What gives logged chunks their tokens; None where the policy learns from the numbers of the chunks."""
    encoder, model = rl_config.model.create_action_encoder(), rl_config.model
    if encoder is None:
        return None
    tokenizer = create_tokenizer(rl_config.data.tokenizer, model.prompt_len)
    if rl_config.data.tokenizer == "byte" and tokenizer.vocab_size > encoder.first_id:
        raise ValueError(
            f"data.tokenizer=byte has {tokenizer.vocab_size} ids, and actions have those from {encoder.first_id} on: "
            f"raise model.vocab_size by {tokenizer.vocab_size - encoder.first_id}"
        )
    return TokenizeActions.create(encoder, tokenizer)
