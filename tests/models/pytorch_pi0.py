"""The forward pass of openpi's PyTorch pi0 and pi0.5, in NumPy, from the arrays of a model.safetensors.

It follows the modules of PyTorch, not our networks: `linear` is torch.nn.Linear, heads are a view of the last axis,
and every layer has arrays of its own.
"""

import math

import numpy as np

Arrays = dict[str, np.ndarray]
_PALIGEMMA = "paligemma_with_expert.paligemma"
_VISION = f"{_PALIGEMMA}.model.vision_tower.vision_model"
_EXPERTS = (f"{_PALIGEMMA}.model.language_model", "paligemma_with_expert.gemma_expert.model")


def linear(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ arrays[f"{name}.weight"].T
    return y + arrays[f"{name}.bias"] if f"{name}.bias" in arrays else y


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    """[b, s, heads * head_dim] -> [b, heads, s, head_dim]."""
    return x.reshape(*x.shape[:2], -1, head_dim).transpose(0, 2, 1, 3)


def merge_heads(x: np.ndarray) -> np.ndarray:
    """[b, heads, s, head_dim] -> [b, s, heads * head_dim]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def image_tokens(arrays: Arrays, images: np.ndarray, num_heads: int) -> np.ndarray:
    """SigLIP and the projector: images [b, height, width, 3] in [-1, 1] -> tokens [b, patches, width]."""
    kernel = arrays[f"{_VISION}.embeddings.patch_embedding.weight"]  # [out, in, height, width]
    patch = kernel.shape[-1]
    b, size = images.shape[0], images.shape[1] // patch
    patches = images.reshape(b, size, patch, size, patch, 3).transpose(0, 1, 3, 5, 2, 4)  # [b, y, x, in, height, width]
    x = patches.reshape(b, size * size, -1) @ kernel.reshape(len(kernel), -1).T
    x = x + arrays[f"{_VISION}.embeddings.patch_embedding.bias"]
    x = x + arrays[f"{_VISION}.embeddings.position_embedding.weight"]
    layer = 0
    while f"{_VISION}.encoder.layers.{layer}.layer_norm1.weight" in arrays:
        name = f"{_VISION}.encoder.layers.{layer}"
        normed = layer_norm(arrays, f"{name}.layer_norm1", x)
        q, k, v = (
            heads(linear(arrays, f"{name}.self_attn.{part}_proj", normed), x.shape[-1] // num_heads) for part in "qkv"
        )
        attention = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v
        x = x + linear(arrays, f"{name}.self_attn.out_proj", merge_heads(attention))
        hidden = linear(arrays, f"{name}.mlp.fc1", layer_norm(arrays, f"{name}.layer_norm2", x))
        x = x + linear(arrays, f"{name}.mlp.fc2", gelu(hidden))
        layer += 1
    x = layer_norm(arrays, f"{_VISION}.post_layernorm", x)
    return linear(arrays, f"{_PALIGEMMA}.model.multi_modal_projector.linear", x)


def layer_norm(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    normed = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return normed * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]


def prompt_tokens(arrays: Arrays, prompt: np.ndarray) -> np.ndarray:
    table = arrays[f"{_PALIGEMMA}.lm_head.weight"]  # the embedding of the tokens, which the two share
    return table[prompt] * math.sqrt(table.shape[-1])


def suffix_tokens(
    arrays: Arrays, state: np.ndarray, x_t: np.ndarray, time: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The tokens of the action expert, and pi0.5's condition."""
    actions = linear(arrays, "action_in_proj", x_t)
    width = actions.shape[-1]
    period = 4e-3 * 1000.0 ** np.linspace(0, 1, width // 2)
    angle = 2 * np.pi * time[:, None] / period
    embedded = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(x_t.dtype)
    if "state_proj.weight" not in arrays:
        condition = silu(linear(arrays, "time_mlp_out", silu(linear(arrays, "time_mlp_in", embedded))))
        return actions, condition
    both = np.concatenate([actions, np.broadcast_to(embedded[:, None], actions.shape)], axis=-1)
    actions = linear(arrays, "action_time_mlp_out", silu(linear(arrays, "action_time_mlp_in", both)))
    return np.concatenate([linear(arrays, "state_proj", state)[:, None], actions], axis=1), None


def rms_norm(
    arrays: Arrays, name: str, x: np.ndarray, condition: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | float]:
    """The normed tokens, and the gate of the residual."""
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    if condition is None:
        return normed * (1 + arrays[f"{name}.weight"]), 1.0
    scale, shift, gate = np.split(linear(arrays, f"{name}.dense", condition)[:, None], 3, axis=-1)
    return normed * (1 + scale) + shift, gate


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding of [b, heads, s, head_dim]; the halves of the head are the two coordinates."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None] / 10000.0 ** (np.arange(half) / half)
    sin, cos = np.sin(angle).astype(x.dtype), np.cos(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def transformer(
    arrays: Arrays,
    streams: tuple[np.ndarray, np.ndarray],
    condition: np.ndarray | None,
    mask: np.ndarray,
    positions: np.ndarray,
    head_dim: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Both experts with their joint attention: tokens [b, s, width] of each; `mask` is [b, s, s] over both."""
    conditions, split = (None, condition), streams[0].shape[1]
    layer = 0
    while f"{_EXPERTS[0]}.layers.{layer}.self_attn.q_proj.weight" in arrays:
        names = [f"{expert}.layers.{layer}" for expert in _EXPERTS]
        normed, gates = zip(
            *(
                rms_norm(arrays, f"{name}.input_layernorm", x, c)
                for name, x, c in zip(names, streams, conditions, strict=True)
            ),
            strict=True,
        )
        q, k, v = (
            np.concatenate(
                [
                    heads(linear(arrays, f"{n}.self_attn.{part}_proj", x), head_dim)
                    for n, x in zip(names, normed, strict=True)
                ],
                axis=2,
            )
            for part in "qkv"
        )
        logits = rotate(q, positions) @ rotate(k, positions).swapaxes(-1, -2) / math.sqrt(head_dim)
        attended = merge_heads(softmax(np.where(mask[:, None], logits, np.float32(-2.3819763e38))) @ v)
        updated = []
        for name, x, part, gate, c in zip(
            names, streams, (attended[:, :split], attended[:, split:]), gates, conditions, strict=True
        ):
            x = x + linear(arrays, f"{name}.self_attn.o_proj", part) * gate
            hidden, gate = rms_norm(arrays, f"{name}.post_attention_layernorm", x, c)
            hidden = gelu(linear(arrays, f"{name}.mlp.gate_proj", hidden)) * linear(
                arrays, f"{name}.mlp.up_proj", hidden
            )
            updated.append(x + linear(arrays, f"{name}.mlp.down_proj", hidden) * gate)
        streams = (updated[0], updated[1])
        layer += 1
    first, second = (
        rms_norm(arrays, f"{expert}.norm", x, c)[0] for expert, x, c in zip(_EXPERTS, streams, conditions, strict=True)
    )
    return first, second
