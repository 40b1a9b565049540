"""What every robot tells the rest of the project about itself.

A config chooses a robot under `data.robot`. The code that prepares data, checks a config, serves or exports a policy
asks the robot; no code outside of `robots` asks which robot it has. Most robots only state names, sizes and units:

    @dataclasses.dataclass(frozen=True)
    class MyArm(Robot):
        action_dim = 7
        state_dims = {"joints": 6, "gripper": 1}
        cameras = {"base_0_rgb": "front"}

        def state_to_model(self, state):
            return np.deg2rad(state)

All methods work on arrays with any leading axes, so that one sample of a client and a whole training batch go through
the same code.
"""

import abc
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from acrlpd.choice import Choice, kind_name
from acrlpd.findings import Finding, error

DataDict = dict[str, Any]
# The image slots of the pi models, in openpi's order.
SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclasses.dataclass(frozen=True)
class ServingLevel:
    """What one action chunk of a served policy costs."""

    num_steps: int
    best_of_n: int
    num_critics: int


@dataclasses.dataclass(frozen=True)
class ServingLimits:
    """How much a server takes on for the clients of a robot."""

    max_concurrent_requests: int | None = None  # requests under way at a time; None: one for each client
    request_timeout_s: float = 30.0


class DatasetColumns(NamedTuple):
    """What a dataset has for a policy, as `data.repack` names it."""

    state: tuple[str, ...]
    actions: tuple[str, ...]
    cameras: Mapping[str, str]  # the model's slot -> camera of the dataset


class Robot(Choice, abc.ABC):
    """A robot as plain data and pure functions. The fields of a member are options that a config may set."""

    package = "acrlpd.robots"

    # Action dims of the robot; None: `qchunking.action_dim` of the config says how many.
    action_dim: ClassVar[int | None] = None
    # Keys of the state in a client's observation, in the model's order, and dims of each; None: any number.
    state_dims: ClassVar[Mapping[str, int | None]] = {"state": None}
    # The model's image slot -> the robot's name of that camera.
    cameras: ClassVar[Mapping[str, str]] = {slot: slot for slot in SLOTS}
    # Key of the dict that holds the images of an observation; None: images lie beside the state.
    image_group: ClassVar[Literal["images"] | None] = "images"
    # Cameras that clients may send and that no policy looks at.
    ignored_cameras: ClassVar[tuple[str, ...]] = ()
    # Names that datasets of this robot use, the usual name first, without what stands before the last dot: of each slot
    # in `cameras`, of each key of `state_dims`, and of "actions". Empty: no dataset is recognised as this robot's.
    dataset_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Action dims that `data.use_delta_joint_actions` makes relative to the state, unless the config names others.
    delta_action_mask: ClassVar[tuple[bool, ...] | None] = None
    # What the level "standard" of a served policy costs; None: as much as in training.
    standard_level: ClassVar[ServingLevel | None] = None
    # What a server of a policy of this robot takes on, unless its command line says otherwise.
    serving_limits: ClassVar[ServingLimits] = ServingLimits()
    # What whoever connects this robot must know about its usual client, because the robot may do harm otherwise.
    client_warning: ClassVar[str | None] = None
    # openpi's class that makes the transforms of this robot; None: openpi does not know this robot.
    openpi_data_config: ClassVar[str | None] = None
    # The argument of openpi's class that makes actions relative; None: the class has no such argument.
    openpi_delta_argument: ClassVar[str | None] = None

    # -- datasets

    @classmethod
    def recognize(cls, dims: Mapping[str, int], cameras: Collection[str]) -> DatasetColumns | None:
        """The columns of this robot in a dataset; None if the dataset seems to be of another robot.

        `dims` has the dims of every column of numbers. State and actions must be there under one of their
        `dataset_names` and have the dims of the robot, and so must one of the cameras.
        """

        def find(key: str, dim: int | None, among: Collection[str]) -> str | None:
            fitting = [column for column in among if dim is None or dims[column] == dim]
            named = ((name, column) for name in cls.dataset_names.get(key, ()) for column in fitting)
            return next((column for name, column in named if column.rpartition(".")[2] == name), None)

        state = [find(key, dim, dims) for key, dim in cls.state_dims.items()]
        actions = find("actions", cls.action_dim, dims)
        slots = {slot: find(slot, None, cameras) for slot in cls.cameras}
        found = {slot: camera for slot, camera in slots.items() if camera is not None}
        if actions is None or not found or None in state:
            return None
        return DatasetColumns(tuple(column for column in state if column is not None), (actions,), found)

    # -- units: a robot whose units differ from those that its policy learns overrides these three

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        """The robot's state [..., s] in the units of the model."""
        return state

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        """The robot's actions [..., a] in the units of the model."""
        return actions

    def actions_from_model(self, actions: np.ndarray) -> np.ndarray:
        """The inverse of `actions_to_model`."""
        return actions

    # -- the way in and out

    def inputs(self, data: DataDict) -> DataDict:
        """A client's observation, or dataset columns after `repack`, in the names and units of the model.

        Actions, images and the prompt are optional: a client sends no actions, and norm statistics need no images.
        """
        parts = [np.asarray(data[key]) for key in self.state_dims]
        for part, (key, dims) in zip(parts, self.state_dims.items(), strict=True):
            if dims not in (None, 1) and part.shape[-1:] != (dims,):
                raise ValueError(
                    f"{key!r} of robot {kind_name(self)} has {dims} dims; found shape {list(part.shape)}. Correct "
                    "data.repack.state"
                )
        axes = max(part.ndim for part in parts)
        # A part of one dim may come without its axis, as one number per sample.
        parts = [part if part.ndim == axes else part[..., None] for part in parts]
        state = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        result: DataDict = {"state": self.state_to_model(state), **self._images(data)}
        if "actions" in data:
            result["actions"] = self.actions_to_model(np.asarray(data["actions"]))
        if "prompt" in data:
            result["prompt"] = data["prompt"]
        return result

    def outputs(self, data: DataDict, *, action_dim: int) -> DataDict:
        """The model's actions cut to the robot's own dims and turned into its units."""
        return {"actions": self.actions_from_model(np.asarray(data["actions"])[..., :action_dim])}

    def repack(self, state: Sequence[str], actions: Sequence[str], cameras: Mapping[str, str]) -> dict[str, Any]:
        """What `inputs` expects -> the dataset's columns; `cameras` is the model's slot -> camera of the dataset."""
        both = set(state) & set(actions)
        if both:
            raise ValueError(
                f"data.repack uses {sorted(both)} as state and as actions; a column can be only one of the two"
            )
        unknown = set(cameras) - set(self.cameras)
        if unknown:
            raise ValueError(
                f"robot {kind_name(self)} has no camera for {sorted(unknown)}; it has {list(self.cameras)}"
            )
        keys = list(self.state_dims)
        if len(keys) > 1 and len(state) != len(keys):
            raise ValueError(
                f"data.repack.state must name a column for each of {', '.join(keys)} of robot {kind_name(self)}; found "
                f"{list(state)}. For one column with all dims use data.robot=generic"
            )
        states = {keys[0]: tuple(state)} if len(keys) == 1 else dict(zip(keys, state, strict=True))
        images = {self.cameras[slot]: column for slot, column in cameras.items()}
        grouped: dict[str, Any] = dict(images) if self.image_group is None else {self.image_group: images}
        return {**states, **grouped, "actions": tuple(actions)}

    def image_path(self, slot: str) -> tuple[str, ...]:
        """Keys that lead to the image of a slot in a client's observation."""
        group = () if self.image_group is None else (self.image_group,)
        return (*group, self.cameras[slot])

    def _images(self, data: DataDict) -> DataDict:
        """{"image", "image_mask"} by slot; a missing camera is black and masked out.

        Without any image the result is empty: norm statistics run the transforms on states and actions alone.
        """
        images = data if self.image_group is None else data.get(self.image_group, {})
        known = {*self.cameras.values(), *self.ignored_cameras}
        unknown = set(images) - known
        if unknown and self.image_group is not None:
            raise ValueError(
                f"the cameras of robot {kind_name(self)} are {sorted(known)}; found also {sorted(unknown)}"
            )
        found = {slot: images.get(self.cameras[slot]) for slot in SLOTS if slot in self.cameras}
        parsed = {slot: parse_image(image) for slot, image in found.items() if image is not None}
        if not parsed:
            return {}
        reference = next(iter(parsed.values()))
        return {
            "image": {slot: parsed[slot] if slot in parsed else np.zeros_like(reference) for slot in SLOTS},
            "image_mask": {slot: np.full(reference.shape[:-3], slot in parsed) for slot in SLOTS},
        }

    # -- checks and exports

    def check(
        self, *, action_dim: int, state: Sequence[str], actions: Sequence[str], cameras: Mapping[str, str]
    ) -> Iterator[Finding]:
        """Errors about a config for this robot: `action_dim` is the config's, the others are those of `repack`."""
        if self.action_dim not in (None, action_dim):
            yield error(
                f"qchunking.action_dim {action_dim} does not fit robot {kind_name(self)}, which has {self.action_dim} "
                "action dims"
            )
        try:
            self.repack(state, actions, cameras)
        except ValueError as problem:
            yield error(str(problem))

    def openpi_arguments(self, *, use_delta_joint_actions: bool) -> dict[str, Any]:
        """Arguments of openpi's data config for this robot."""
        argument = self.openpi_delta_argument
        return {} if argument is None else {argument: use_delta_joint_actions}

    def openpi_differences(self, *, action_dim: int) -> Iterator[str]:
        """What the README of an export tells openpi's users to do about this robot."""
        if self.openpi_data_config is None:
            yield (
                "YourDataConfig is yours to write: openpi has no class for this robot. Its transforms must "
                "convert states, actions and images as the class "
                f"`{type(self).__module__}:{type(self).__qualname__}` of acrlpd does, and the first {action_dim} "
                "action dims come out."
            )


def make_bool_mask(*dims: int) -> tuple[bool, ...]:
    """A mask from its run-length code: 6 stands for six times True, -1 for one False, 0 for nothing."""
    return tuple(dim > 0 for dim in dims for _ in range(abs(dim)))


def parse_image(image: np.ndarray) -> np.ndarray:
    """To uint8 [..., h, w, 3], from float in [0, 1] and from channels-first, as robots send them."""
    image = np.asarray(image)
    if np.issubdtype(image.dtype, np.floating):
        image = (255 * image).astype(np.uint8)
    if image.shape[-3] == 3:
        image = np.moveaxis(image, -3, -1)
    return image
