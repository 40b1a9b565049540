"""From a config to the chain of transforms that training, norm statistics and serving share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acrlpd.config import DataConfig, RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.tokenizer import create_tokenizer
from acrlpd.data.pipeline.transforms import (
    AbsoluteActions,
    DataDict,
    DataTransformFn,
    DeltaActions,
    Group,
    InjectDefaultPrompt,
    Normalize,
    PadStatesAndActions,
    RepackTransform,
    ResizeImages,
    TokenizePrompt,
    Unnormalize,
    compose,
    make_bool_mask,
)
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.robots import (
    aloha as aloha_transforms,
)
from acrlpd.robots import (
    droid as droid_transforms,
)
from acrlpd.robots import (
    generic as generic_transforms,
)
from acrlpd.robots import (
    libero as libero_transforms,
)
from acrlpd.robots.naming import RobotOutputs


@dataclasses.dataclass(frozen=True)
class PolicyTransforms:
    """Everything between a dataset (or a robot) and the policy."""

    repack: Group
    data: Group
    model: Group
    use_quantile_norm: bool
    cameras: Mapping[str, str]  # the model's slot -> the dataset's camera, for those that the policy is given

    def training_inputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """Dataset columns to what the model eats."""
        return compose([*self.repack.inputs, self._inputs(norm_stats)])

    def serving_inputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """A robot's observation to what the model eats."""
        return self._inputs(norm_stats)

    def serving_outputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        """The model's {"state", "actions"} to a robot's {"actions"}; undoes the inputs."""
        unnormalize = Unnormalize(norm_stats, use_quantiles=self.use_quantile_norm)
        return compose([*self.model.outputs, unnormalize, *self.data.outputs])

    def _inputs(self, norm_stats: Mapping[str, NormStats] | None) -> DataTransformFn:
        normalize = Normalize(norm_stats, use_quantiles=self.use_quantile_norm)
        return compose([*self.data.inputs, normalize, *self.model.inputs])


@dataclasses.dataclass(frozen=True)
class SelectImages:
    """Keeps only the cameras that the policy is given; the others cost nothing further on."""

    image_keys: tuple[str, ...]

    def __call__(self, data: DataDict) -> DataDict:
        if "image" not in data:
            return data
        return {
            **data,
            "image": {key: data["image"][key] for key in self.image_keys},
            "image_mask": {key: data["image_mask"][key] for key in self.image_keys},
        }


def create_policy_transforms(rl_config: RLTrainConfig) -> PolicyTransforms:
    """The chain for a config: the robot's transforms, relative actions, and what the model needs."""
    config, model = rl_config.data, rl_config.model
    cameras: dict[str, str] = {}
    if isinstance(model, Pi0Config):
        cameras = {slot: name for slot, name in config.repack.cameras.items() if slot in model.image_keys}
    quantiles = isinstance(model, Pi0Config) and model.pi05
    if config.use_quantile_norm is not None:
        quantiles = config.use_quantile_norm
    return PolicyTransforms(
        repack=Group(inputs=(RepackTransform(repack_structure(config, cameras)),)),
        data=_data_transforms(rl_config),
        model=_model_transforms(config, model),
        use_quantile_norm=quantiles,
        cameras=cameras,
    )


def create_statistics_transform(rl_config: RLTrainConfig) -> DataTransformFn:
    """What is done to the columns before norm statistics are taken; needs no camera and no tokenizer."""
    repack = RepackTransform(repack_structure(rl_config.data, {}))
    return compose([repack, *_data_transforms(rl_config).inputs])


def describe_statistics_transform(config: DataConfig) -> dict[str, Any]:
    """All that `create_statistics_transform` depends on, as plain JSON; kept with norm statistics."""
    mask = delta_action_mask(config)
    return {
        "robot": config.robot,
        "adapt_to_pi": config.adapt_to_pi,
        "delta_action_mask": None if mask is None else list(mask),
        "state_columns": list(config.repack.state),
        "action_columns": list(config.repack.actions),
    }


def delta_action_mask(config: DataConfig) -> tuple[bool, ...] | None:
    """Which action dims become relative to the state; None: all stay absolute."""
    if not config.use_delta_joint_actions:
        return None
    mask = known_delta_mask(config)
    if mask is None:
        raise ValueError(
            "data.use_delta_joint_actions=true needs data.delta_action_mask for a generic robot, for example "
            "(6, -1) for six relative joints and an absolute gripper"
        )
    return mask


def known_delta_mask(config: DataConfig) -> tuple[bool, ...] | None:
    """The action dims that would become relative: those of the config, or the robot's usual ones."""
    if config.delta_action_mask is not None:
        return make_bool_mask(*config.delta_action_mask)
    usual = {
        "aloha": aloha_transforms.DELTA_ACTION_MASK,
        "droid": droid_transforms.DELTA_ACTION_MASK,
        "libero": libero_transforms.DELTA_ACTION_MASK,
    }
    return usual.get(config.robot)


def repack_structure(config: DataConfig, cameras: Mapping[str, str]) -> dict[str, Any]:
    """What the robot's input transform expects -> the dataset's columns, and its cameras by slot."""
    repack = config.repack
    both = set(repack.state) & set(repack.actions)
    if both:
        raise ValueError(f"data.repack uses {sorted(both)} as state and as actions; a column can be only one")
    names = {
        "aloha": aloha_transforms.CAMERAS,
        "droid": droid_transforms.CAMERAS,
        "libero": libero_transforms.CAMERAS,
        "generic": generic_transforms.CAMERAS,
    }[config.robot]
    unknown = set(cameras) - set(names)
    if unknown:
        raise ValueError(f"a {config.robot} robot has no camera for {sorted(unknown)}; it has {list(names)}")
    images = {names[slot]: column for slot, column in cameras.items()}
    if config.robot == "droid":
        if len(repack.state) != 2:
            raise ValueError(
                "data.repack.state of a DROID robot is (joint position column, gripper position column); "
                f"found {repack.state}. For one column with all dims use data.robot=generic"
            )
        joints, gripper = repack.state
        state: dict[str, Any] = {
            "observation/joint_position": joints,
            "observation/gripper_position": gripper,
        }
    elif config.robot == "libero":
        state = {"observation/state": repack.state}
    else:
        return {"state": repack.state, "images": images, "actions": repack.actions}
    return {**state, **images, "actions": repack.actions}


def _data_transforms(rl_config: RLTrainConfig) -> Group:
    """The robot's inputs and outputs, and relative actions between them and the model."""
    config = rl_config.data
    if config.robot == "aloha":
        group = Group(
            inputs=(aloha_transforms.AlohaInputs(adapt_to_pi=config.adapt_to_pi),),
            outputs=(aloha_transforms.AlohaOutputs(adapt_to_pi=config.adapt_to_pi),),
        )
    elif config.robot == "droid":
        group = Group((droid_transforms.DroidInputs(),), (RobotOutputs(droid_transforms.ACTION_DIM),))
    elif config.robot == "libero":
        group = Group((libero_transforms.LiberoInputs(),), (RobotOutputs(libero_transforms.ACTION_DIM),))
    else:
        group = Group((generic_transforms.GenericInputs(),), (RobotOutputs(rl_config.qchunking.action_dim),))
    mask = delta_action_mask(config)
    if mask is None:
        return group
    return group.push(inputs=[DeltaActions(mask)], outputs=[AbsoluteActions(mask)])


def _model_transforms(config: DataConfig, model: Pi0Config | StateFlowPolicyConfig) -> Group:
    """The state-space policy takes state and actions alone, as wide as they are."""
    if isinstance(model, StateFlowPolicyConfig):
        return Group()
    tokenizer = create_tokenizer(config.tokenizer, model.prompt_len)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"data.tokenizer={config.tokenizer} has {tokenizer.vocab_size} ids, the model's vocab_size is "
            f"{model.vocab_size}; use data.tokenizer=byte for a small vocabulary"
        )
    return Group(
        inputs=(
            InjectDefaultPrompt(config.default_prompt),
            SelectImages(model.image_keys),
            ResizeImages(*model.image_resolution),
            TokenizePrompt(tokenizer, discrete_state_input=bool(model.discrete_state_input)),
            PadStatesAndActions(model.action_dim),
        )
    )
