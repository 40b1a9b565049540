"""openpi's PyTorch layout: one file model.safetensors with the names and shapes of its `PI0Pytorch`.

The module of PyTorch is made of the Gemma, PaliGemma and SigLIP of `transformers`. It holds the same numbers in other
shapes: every layer has arrays of its own, a linear layer stores [out, in], and heads are merged with their dims. Norms
keep their values: both sides multiply by 1 + scale. One table says where each array goes, and it is read in both
directions.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from acrlpd.installation import install_command
from acrlpd.models.openpi_checkpoint import (
    LORA,
    OpenPICheckpointError,
    fill_params,
    flatten_params,
    mismatches,
    sharding_of,
)

WEIGHTS_FILE = "model.safetensors"

_MAX_PROBLEMS = 10  # in one message; a file of another model has hundreds

_PALIGEMMA = "paligemma_with_expert.paligemma"
_EXPERT = "paligemma_with_expert.gemma_expert"
# PaliGemma's output layer is its embedding table. openpi's converter writes the table under the first of the two names.
_EMBEDDING = f"{_PALIGEMMA}.lm_head.weight"
_EMBEDDING_AGAIN = f"{_PALIGEMMA}.model.language_model.embed_tokens.weight"
# The output layer of the action expert is never used, but openpi and lerobot refuse a file without it.
_UNUSED_OUTPUT_LAYER = f"{_EXPERT}.lm_head.weight"

# Each axis of an array of PyTorch, as the axes of our array that are merged into it.
Axes = tuple[tuple[int, ...], ...]
_VECTOR: Axes = ((0,),)
_MATRIX: Axes = ((0,), (1,))
_LINEAR: Axes = ((1,), (0,))  # [in, out] -> [out, in]
_TO_HEADS: Axes = ((0, 2), (1,))  # Gemma: [heads, in, head_dim] -> [heads * head_dim, in]
_FROM_HEADS: Axes = ((2,), (0, 1))  # [heads, head_dim, out] -> [out, heads * head_dim]
_IMAGE_TO_HEADS: Axes = ((1, 2), (0,))  # SigLIP: [in, heads, head_dim] -> [heads * head_dim, in]
_IMAGE_HEADS_BIAS: Axes = ((0, 1),)  # [heads, head_dim] -> [heads * head_dim]
_CONVOLUTION: Axes = ((3,), (2,), (0,), (1,))  # [height, width, in, out] -> [out, in, height, width]
_POSITIONS: Axes = ((0, 1), (2,))  # [1, patches, width] -> [patches, width]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array of PyTorch is in our policy: a part of a parameter, with its axes in another order."""

    parameter: str  # '/'-joined
    index: tuple[int, ...]  # the layer, and key / value or gate / up, of a parameter that holds several arrays
    axes: Axes

    def shape(self, parameter_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in PyTorch."""
        part = parameter_shape[len(self.index) :]
        return tuple(math.prod(part[axis] for axis in merged) for merged in self.axes)

    def read(self, parameter: np.ndarray) -> np.ndarray:
        """The array of PyTorch, in one block of memory, as the file wants it."""
        part = parameter[self.index].transpose(self._order)
        return np.ascontiguousarray(part.reshape(self.shape(parameter.shape)))

    def write(self, parameter: np.ndarray, array: np.ndarray) -> None:
        """Puts the array of PyTorch into its part of `parameter`, in place."""
        part = parameter[self.index].transpose(self._order)
        part[...] = array.reshape(part.shape)

    @property
    def _order(self) -> list[int]:
        return [axis for merged in self.axes for axis in merged]


def _linear(name: str, parameter: str) -> dict[str, Place]:
    return {
        f"{name}.weight": Place(f"{parameter}/kernel", (), _LINEAR),
        f"{name}.bias": Place(f"{parameter}/bias", (), _VECTOR),
    }


def _norm_with_bias(name: str, parameter: str) -> dict[str, Place]:
    return {
        f"{name}.weight": Place(f"{parameter}/scale", (), _VECTOR),
        f"{name}.bias": Place(f"{parameter}/bias", (), _VECTOR),
    }


def _gemma_norm(name: str, parameter: str) -> dict[str, Place]:
    """A scale, or in pi0.5's action expert a linear layer that makes scale, shift and gate of the flow time."""
    return {
        f"{name}.weight": Place(f"{parameter}/scale", (), _VECTOR),
        **_linear(f"{name}.dense", f"{parameter}/Dense_0"),
    }


def _gemma(model: str, expert: str) -> dict[str, Place]:
    """One expert of the transformer; `expert` is the end of its names in our tree."""
    layer, layers = f"{model}.layers.*", "PaliGemma/llm/layers"
    attention, mlp = f"{layers}/attn", f"{layers}/mlp{expert}"
    return {
        f"{layer}.self_attn.q_proj.weight": Place(f"{attention}/q_einsum{expert}/w", (), _TO_HEADS),
        f"{layer}.self_attn.k_proj.weight": Place(f"{attention}/kv_einsum{expert}/w", (0,), _TO_HEADS),
        f"{layer}.self_attn.v_proj.weight": Place(f"{attention}/kv_einsum{expert}/w", (1,), _TO_HEADS),
        f"{layer}.self_attn.o_proj.weight": Place(f"{attention}/attn_vec_einsum{expert}/w", (), _FROM_HEADS),
        f"{layer}.mlp.gate_proj.weight": Place(f"{mlp}/gating_einsum", (0,), _LINEAR),
        f"{layer}.mlp.up_proj.weight": Place(f"{mlp}/gating_einsum", (1,), _LINEAR),
        f"{layer}.mlp.down_proj.weight": Place(f"{mlp}/linear", (), _LINEAR),
        **_gemma_norm(f"{layer}.input_layernorm", f"{layers}/pre_attention_norm{expert}"),
        **_gemma_norm(f"{layer}.post_attention_layernorm", f"{layers}/pre_ffw_norm{expert}"),
        **_gemma_norm(f"{model}.norm", f"PaliGemma/llm/final_norm{expert}"),
    }


def _siglip(model: str) -> dict[str, Place]:
    layer, block = f"{model}.encoder.layers.*", "PaliGemma/img/Transformer/encoderblock"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    places = {
        f"{model}.embeddings.patch_embedding.weight": Place("PaliGemma/img/embedding/kernel", (), _CONVOLUTION),
        f"{model}.embeddings.patch_embedding.bias": Place("PaliGemma/img/embedding/bias", (), _VECTOR),
        f"{model}.embeddings.position_embedding.weight": Place("PaliGemma/img/pos_embedding", (), _POSITIONS),
        **_norm_with_bias(f"{layer}.layer_norm1", f"{block}/LayerNorm_0"),
        **_norm_with_bias(f"{layer}.layer_norm2", f"{block}/LayerNorm_1"),
        f"{layer}.self_attn.out_proj.weight": Place(f"{attention}/out/kernel", (), _FROM_HEADS),
        f"{layer}.self_attn.out_proj.bias": Place(f"{attention}/out/bias", (), _VECTOR),
        **_linear(f"{layer}.mlp.fc1", f"{block}/MlpBlock_0/Dense_0"),
        **_linear(f"{layer}.mlp.fc2", f"{block}/MlpBlock_0/Dense_1"),
        **_norm_with_bias(f"{model}.post_layernorm", "PaliGemma/img/Transformer/encoder_norm"),
    }
    for name, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        places[f"{layer}.self_attn.{name}.weight"] = Place(f"{attention}/{ours}/kernel", (), _IMAGE_TO_HEADS)
        places[f"{layer}.self_attn.{name}.bias"] = Place(f"{attention}/{ours}/bias", (), _IMAGE_HEADS_BIAS)
    return places


_PROJECTIONS = (
    *("action_in_proj", "action_out_proj"),
    *("state_proj", "action_time_mlp_in", "action_time_mlp_out"),  # of pi0
    *("time_mlp_in", "time_mlp_out"),  # of pi0.5
)

# Every array of pi0 and of pi0.5. A name with a star stands for one array in each layer; our parameter has all layers.
_TABLE: dict[str, Place] = {
    **_siglip(f"{_PALIGEMMA}.model.vision_tower.vision_model"),
    **_linear(f"{_PALIGEMMA}.model.multi_modal_projector.linear", "PaliGemma/img/head"),
    _EMBEDDING: Place("PaliGemma/llm/embedder/input_embedding", (), _MATRIX),
    **_gemma(f"{_PALIGEMMA}.model.language_model", expert=""),
    **_gemma(f"{_EXPERT}.model", expert="_1"),
    **{name: place for projection in _PROJECTIONS for name, place in _linear(projection, projection).items()},
}


def pytorch_places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """The arrays of PyTorch that hold the parameters of these names and shapes."""
    places: dict[str, Place] = {}
    for name, place in _TABLE.items():
        if place.parameter not in shapes:  # pi0 and pi0.5 have some parameters that the other one lacks
            continue
        if "*" in name:
            for layer in range(shapes[place.parameter][0]):
                places[name.replace("*", str(layer))] = dataclasses.replace(place, index=(layer, *place.index))
        else:
            places[name] = place
    unknown = sorted(set(shapes) - {place.parameter for place in places.values()})
    if unknown:
        raise OpenPICheckpointError(
            f"openpi's PyTorch model has no place for {', '.join(unknown[:3])}"
            + (f" and {len(unknown) - 3} more parameters" if len(unknown) > 3 else "")
        )
    return places


def pytorch_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all arrays of a file, for a policy with these parameters."""
    found = {name: place.shape(shapes[place.parameter]) for name, place in pytorch_places(shapes).items()}
    vocabulary, _ = found[_EMBEDDING]
    return found | {_UNUSED_OUTPUT_LAYER: (vocabulary, *shapes["action_in_proj/bias"])}


def find_pytorch_file(path: str | pathlib.Path) -> pathlib.Path | None:
    """The safetensors file that `path`, on this machine, is or has; None if there is no such file."""
    local = pathlib.Path(path).expanduser()
    file = local / WEIGHTS_FILE if local.is_dir() else local
    return file if file.suffix == ".safetensors" and file.is_file() else None


def save_pytorch_weights(params: nnx.State, file: pathlib.Path) -> None:
    """Writes a policy without adapters as openpi's converter does. Every array keeps its precision."""
    safetensors = _require_safetensors()
    flat = {name: np.asarray(leaf) for name, leaf in flatten_params(params).items()}
    shapes = {name: value.shape for name, value in flat.items()}
    arrays = {name: place.read(flat[place.parameter]) for name, place in pytorch_places(shapes).items()}
    arrays[_UNUSED_OUTPUT_LAYER] = np.zeros(pytorch_shapes(shapes)[_UNUSED_OUTPUT_LAYER], arrays[_EMBEDDING].dtype)
    file.touch()
    permissions = file.stat().st_mode
    # What safetensors itself notes of a PyTorch model: the kind of the file, and which of two equal arrays it left out.
    safetensors.numpy.save_file(arrays, file, metadata={"format": "pt", _EMBEDDING_AGAIN: _EMBEDDING})
    file.chmod(permissions)  # safetensors leaves a file that its owner alone may read, and a server may be another user


def load_pytorch_weights(file: pathlib.Path, params: nnx.State, *, missing_regex: str | None = LORA) -> nnx.State:
    """`params` with the values of a file that openpi's converter, lerobot or `save_pytorch_weights` wrote.

    Every leaf keeps the dtype and the sharding that it has in `params`. Leaves may be `jax.ShapeDtypeStruct`, but those
    whose name matches `missing_regex` (by default LoRA adapters), which such a file never has, keep their values.
    """
    safetensors = _require_safetensors()
    flat = flatten_params(params)
    targets = {name: leaf for name, leaf in flat.items() if not re.fullmatch(missing_regex or "", name)}
    places = pytorch_places({name: tuple(leaf.shape) for name, leaf in targets.items()})
    try:
        with safetensors.safe_open(file, framework="np") as stored:
            names = {_openpi_name(name): name for name in stored.keys()}  # noqa: SIM118, `stored` is no mapping
            shapes = {name: tuple(stored.get_slice(key).get_shape()) for name, key in names.items()}
            _refuse_mismatches(file, shapes, places, targets)
            values: dict[str, jax.Array] = {}
            for parameter, leaf in targets.items():  # one after the other, so that the host holds one at a time
                array = np.empty(leaf.shape, leaf.dtype)
                for name, place in places.items():
                    if place.parameter == parameter:
                        place.write(array, stored.get_tensor(names[name]))
                values[parameter] = jax.device_put(array, sharding_of(leaf))
    except (OSError, safetensors.SafetensorError) as error:
        raise OpenPICheckpointError(f"{file} is damaged or not a safetensors file: {error}") from error
    return fill_params(params, values, file)


def _openpi_name(name: str) -> str:
    """openpi's name of an array: lerobot's policies put "model." before it, and some files name the embedding twice."""
    name = name.removeprefix("model.")
    return _EMBEDDING if name == _EMBEDDING_AGAIN else name


def _refuse_mismatches(
    file: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Place], targets: Mapping[str, Any]
) -> None:
    wanted = {
        name: jax.ShapeDtypeStruct(place.shape(targets[place.parameter].shape), np.float32)
        for name, place in places.items()
    }
    problems = mismatches(shapes, wanted, missing_regex=None)
    if problems:
        more = [f"... and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        raise OpenPICheckpointError(
            f"{file} does not fit the model:\n  " + "\n  ".join([*problems[:_MAX_PROBLEMS], *more])
        )


def _require_safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise OpenPICheckpointError(
            f"PyTorch's file format needs the package safetensors: {install_command('pytorch')}"
        ) from None
    return safetensors
