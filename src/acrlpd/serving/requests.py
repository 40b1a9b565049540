"""What a client may send: an observation as openpi's robots send it, and options beside it.

Every message is checked before it shares a batch with the messages of other clients, so that a mistake concerns its
sender alone.
"""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats

_MAX_IMAGE_SIDE = 4096
_MAX_CHARACTERS_PER_TOKEN = 64
_MAX_SEED = 2**63
_NUMBERS = (int, float, np.number)
_NO_PROMPT = "there is no prompt: say what to do in 'prompt'"


class RequestError(ValueError):
    """A request that cannot be answered; the message says why."""


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """What a client may ask for beside an action chunk."""

    best_of_n: int
    num_steps: int
    seed: int | None  # None: the server draws one
    return_candidates: bool


def split_options(
    message: Any, *, most_candidates: int, num_steps: Sequence[int], has_critics: bool
) -> tuple[dict[str, Any], RequestOptions]:
    """Takes the options out of a message; the rest is the observation.

    The server was compiled for `most_candidates`, which are also the default, and for `num_steps`, the default first.
    """
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise RequestError(f"a request must be a dict with text keys; found {type(message).__name__}")
    observation = dict(message)
    best_of_n = _integer("best_of_n", observation.pop("best_of_n", most_candidates))
    if not 1 <= best_of_n <= most_candidates:
        if not has_critics and best_of_n > 1:
            raise RequestError(f"best_of_n={best_of_n}: the served checkpoint has no critics to choose by; use 1")
        raise RequestError(
            f"best_of_n must be from 1 to {most_candidates}, for which this server was started; found {best_of_n}"
        )
    steps = _integer("num_steps", observation.pop("num_steps", num_steps[0]))
    if steps not in num_steps:
        known = ", ".join(map(str, num_steps))
        raise RequestError(f"num_steps must be one of those this server was started for ({known}); found {steps}")
    seed = observation.pop("seed", None)
    if seed is not None and not 0 <= (seed := _integer("seed", seed)) < _MAX_SEED:
        raise RequestError(f"seed must be from 0 to 2**63 - 1; found {seed}")
    return_candidates = observation.pop("return_candidates", False)
    if not isinstance(return_candidates, (bool, np.bool_)):
        raise RequestError(f"return_candidates must be true or false; found {type(return_candidates).__name__}")
    return observation, RequestOptions(best_of_n, steps, seed, bool(return_candidates))


def _integer(name: str, value: Any) -> int:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} must be an integer; found {type(value).__name__}")
    return int(value)


@dataclasses.dataclass(frozen=True)
class ObservationSpec:
    """What the observations of one policy must look like."""

    states: Mapping[str, range | None]  # key -> how many dims it may have; None: not known
    cameras: tuple[tuple[str, ...], ...]  # paths of the images that the policy was trained with
    images_beside: tuple[str, ...]  # keys of images that lie beside the state, those that no policy needs included
    dataset_cameras: Mapping[str, str]  # the dataset's name of a camera, which clients may use -> the robot's name
    max_prompt_characters: int | None  # None: the policy does not read prompts
    prompt_required: bool

    @property
    def required_keys(self) -> list[str]:
        """What an observation must have; a slash leads to a key of a dict."""
        prompt = ["prompt"] if self.prompt_required else []
        return [*self.states, *("/".join(path) for path in self.cameras), *prompt]

    def check(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """The part of the observation that the robot names, with its states as float arrays.

        Whatever else a client sends is left out, so that nothing unchecked is ever converted.
        """
        observation = self._with_robot_names(observation)
        checked: dict[str, Any] = {
            key: _checked_state(key, _lookup(observation, (key,)), dims) for key, dims in self.states.items()
        }
        for path in self.cameras:
            _lookup(observation, path, other_names=self._other_names(path))
        images = observation.get("images", {})
        if not isinstance(images, dict):
            raise RequestError(f"images must be a dict of cameras; found {type(images).__name__}")
        beside = {key: observation[key] for key in self.images_beside if key in observation}
        for name, image in [*((f"images/{name}", image) for name, image in images.items()), *beside.items()]:
            _check_image(name, image)
        checked |= {**beside, "images": images} if images else beside
        if self.max_prompt_characters is not None and "prompt" in observation:
            checked["prompt"] = _checked_prompt(observation["prompt"], self.max_prompt_characters)
        elif self.prompt_required:
            raise RequestError(_NO_PROMPT)
        return checked

    def _with_robot_names(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """The observation with the robot's names of cameras in place of the dataset's."""
        if self.images_beside:
            return _renamed(observation, self.dataset_cameras)
        images = observation.get("images")
        renamed = _renamed(images, self.dataset_cameras) if isinstance(images, dict) else images
        return {**observation, "images": renamed} if "images" in observation else dict(observation)

    def _other_names(self, path: tuple[str, ...]) -> list[str]:
        """The paths under which a client may send this image as well."""
        return ["/".join((*path[:-1], name)) for name, own in self.dataset_cameras.items() if own == path[-1]]


def create_observation_spec(rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None) -> ObservationSpec:
    """What the robot and the policy of a config ask of an observation."""
    config, model = rl_config.data, rl_config.model
    trained = norm_stats["state"].trained_dims(model.action_dim) if norm_stats else None
    any_dims = trained if model.pads_actions else range(model.state_dim, model.state_dim + 1)
    robot_names = {*config.robot.cameras.values(), *config.robot.ignored_cameras}
    return ObservationSpec(
        {key: any_dims if dim is None else range(dim, dim + 1) for key, dim in config.robot.state_dims.items()},
        tuple(config.robot.image_path(slot) for slot in config.repack.cameras if slot in model.image_keys),
        () if config.robot.image_group else (*config.robot.cameras.values(), *config.robot.ignored_cameras),
        {
            name: config.robot.cameras[slot]
            for slot, name in config.repack.cameras.items()
            if name not in robot_names and name not in config.robot.state_dims
        },
        max_prompt_characters=_MAX_CHARACTERS_PER_TOKEN * model.prompt_len or None,
        prompt_required=model.prompt_len > 0 and config.default_prompt is None,
    )


def _renamed(images: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The images under the names that `names` gives to some of them; a camera must not come twice."""
    for name, own in names.items():
        if name in images and own in images:
            raise RequestError(f"one camera came twice, as {own!r} and as {name!r}; send one of the two")
    return {names.get(name, name): image for name, image in images.items()}


def _lookup(observation: Mapping[str, Any], path: tuple[str, ...], other_names: Sequence[str] = ()) -> Any:
    value: Any = observation
    for depth, key in enumerate(path):
        if not isinstance(value, dict) or key not in value:
            found = ", ".join(sorted(map(str, value))[:20]) if isinstance(value, dict) else type(value).__name__
            where = "/".join(path[:depth]) or "the observation"
            wanted = " or ".join(map(repr, ("/".join(path), *other_names)))
            raise RequestError(f"the observation lacks {wanted}; {where} has: {found or 'nothing'}")
        value = value[key]
    return value


def _checked_state(name: str, state: Any, dims: range | None) -> np.ndarray:
    # A list of lists or of texts would take np.asarray seconds and gigabytes.
    if isinstance(state, list) and all(isinstance(x, _NUMBERS) and not isinstance(x, bool) for x in state):
        state = np.array(state, np.float64)
    if not isinstance(state, (np.ndarray, *_NUMBERS)) or isinstance(state, bool):
        raise RequestError(f"{name} must be numbers: an array or a flat list; found {_kind(state)}")
    array = np.asarray(state)
    if array.dtype.kind not in "iuf":
        raise RequestError(f"{name} must be numbers; found an array of {array.dtype}")
    if array.ndim == 0 and dims == range(1, 2):  # a gripper may come as one number
        array = array[None]
    if array.ndim != 1 or (dims is not None and len(array) not in dims):
        expected = "one vector"
        if dims is not None:
            expected = f"{dims[0]} numbers" if len(dims) == 1 else f"{dims[0]} to {dims[-1]} numbers"
        raise RequestError(f"{name} must be {expected}; found shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise RequestError(f"{name} has NaN or infinite values")
    return array if array.dtype.kind == "f" else array.astype(np.float32)


def _kind(value: Any) -> str:
    """What a client sent in place of numbers; of a list also what it holds."""
    kinds = sorted({type(item).__name__ for item in value}) if isinstance(value, list) else []
    return f"a list of {' and '.join(kinds)}" if kinds else type(value).__name__


def _checked_prompt(prompt: Any, max_characters: int) -> str:
    if prompt is None:
        raise RequestError(_NO_PROMPT)
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be text; found {type(prompt).__name__}")
    if len(prompt) > max_characters:
        raise RequestError(f"prompt is too long: {len(prompt)} characters, and the policy reads {max_characters}")
    return prompt


def _check_image(name: str, image: Any) -> None:
    if not isinstance(image, np.ndarray):
        raise RequestError(f"image {name!r} must be an array; found {type(image).__name__}")
    if image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
        raise RequestError(f"image {name!r} must be [3, h, w] or [h, w, 3]; found shape {list(image.shape)}")
    if not 1 <= min(image.shape) <= max(image.shape) <= _MAX_IMAGE_SIDE:
        raise RequestError(f"image {name!r} must have sides of 1 to {_MAX_IMAGE_SIDE}; found {list(image.shape)}")
    if image.dtype.kind == "f":
        if not np.isfinite(image).all():
            raise RequestError(f"image {name!r} has NaN or infinite values")
        if image.min() < 0 or image.max() > 1:
            raise RequestError(
                f"image {name!r} is float and must lie in [0, 1]; found {image.min():.3g} to {image.max():.3g}"
            )
    elif image.dtype != np.uint8:
        raise RequestError(f"image {name!r} must be uint8, or float in [0, 1]; found {image.dtype}")
