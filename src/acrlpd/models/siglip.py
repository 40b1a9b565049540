"""SigLIP: the vision transformer that turns an image into tokens for the language model."""

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.layers import full_attention, param_dict, scan_layers, split_by_sample
from acrlpd.models.paligemma_sizes import BackboneConfig, SiglipConfig

_xavier = nnx.initializers.xavier_uniform(in_axis=-2, out_axis=-1, batch_axis=0)
_LAYER_NORM_EPS = 1e-6


def _affine(kernel: jax.Array, bias: jax.Array) -> nnx.Dict:
    return nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(bias))


def _linear(*shape: int, rngs: nnx.Rngs) -> nnx.Dict:
    kernel = nnx.initializers.lecun_normal()(rngs.params(), shape, jnp.float32)
    return _affine(kernel, jnp.zeros(shape[-1:], jnp.float32))


def _norm_weights(*shape: int) -> nnx.Dict:
    return nnx.Dict(scale=nnx.Param(jnp.ones(shape, jnp.float32)), bias=nnx.Param(jnp.zeros(shape, jnp.float32)))


def _create_blocks(config: SiglipConfig, rngs: nnx.Rngs) -> nnx.Dict:
    """All layers' weights under openpi's names, stacked on a leading depth axis."""
    depth, width, heads = config.depth, config.width, config.num_heads
    head_dim = width // heads
    small = nnx.initializers.normal(stddev=1e-6)

    def kernel(fan_in: int, fan_out: int) -> jax.Array:
        return _xavier(rngs.params(), (depth, fan_in, fan_out), jnp.float32)

    attention: nnx.Dict = nnx.Dict()
    mlp: nnx.Dict = nnx.Dict()
    for name in ("query", "key", "value"):  # The fans are those of the flat [width, width] projection.
        weights = kernel(width, width).reshape(depth, width, heads, head_dim)
        attention[name] = _affine(weights, jnp.zeros((depth, heads, head_dim), jnp.float32))
    weights = kernel(width, width).reshape(depth, heads, head_dim, width)
    attention["out"] = _affine(weights, jnp.zeros((depth, width), jnp.float32))
    for name, fan_in, fan_out in (("Dense_0", width, config.mlp_dim), ("Dense_1", config.mlp_dim, width)):
        mlp[name] = _affine(kernel(fan_in, fan_out), small(rngs.params(), (depth, fan_out), jnp.float32))
    return nnx.Dict(
        LayerNorm_0=_norm_weights(depth, width),
        LayerNorm_1=_norm_weights(depth, width),
        MultiHeadDotProductAttention_0=attention,
        MlpBlock_0=mlp,
    )


class Siglip(nnx.Module):
    """Images [b, h, w, 3] in [-1, 1] to tokens [b, h/patch * w/patch, out_dim]."""

    def __init__(self, config: BackboneConfig, rngs: nnx.Rngs):
        width, patch = config.siglip.width, config.siglip.patch_size
        self.patch_size = patch
        self.dtype = jnp.dtype(config.dtype)
        self.remat_policy = config.remat_policy
        self.embedding = _linear(patch, patch, 3, width, rngs=rngs)
        # Positions start as large as patches, and the head does not start at zero; a checkpoint replaces both. With
        # openpi's own initial values (width**-0.5 and zero), a policy that starts from scratch does not learn to see:
        # the first norm of the language model turns tokens near zero into one direction, which hides what differs
        # between images, and hardly any gradient comes back to the layers here.
        init_position = nnx.initializers.normal(stddev=1.0)
        positions = init_position(rngs.params(), (1, config.tokens_per_image, width), jnp.float32)
        self.pos_embedding = nnx.Param(positions)
        self.Transformer = nnx.Dict(encoderblock=_create_blocks(config.siglip, rngs), encoder_norm=_norm_weights(width))
        self.head = _linear(width, config.experts[0].width, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed_patches(images).astype(self.dtype)
        weights = param_dict(self.Transformer)
        blocks = weights["encoderblock"]
        x, _ = scan_layers(lambda x, weights: (encoder_block(x, weights), None), x, blocks, self.remat_policy)
        return _dense(layer_norm(x, **weights["encoder_norm"]), **param_dict(self.head))

    def embed_patches(self, images: jax.Array) -> jax.Array:
        """Patches in row-major order, projected, with their positions added, in float32: [b, tokens, width]."""
        b, h, w, c = images.shape
        patch = self.patch_size
        rows, columns = h // patch, w // patch
        # A stride-equals-size convolution is one matrix product over flattened patches.
        x = images[:, : rows * patch, : columns * patch].astype(jnp.float32)
        x = x.reshape(b, rows, patch, columns, patch, c).transpose(0, 1, 3, 2, 4, 5)
        kernel = self.embedding.kernel[...].astype(jnp.float32).reshape(patch * patch * c, -1)
        x = x.reshape(b, rows * columns, -1) @ kernel + self.embedding.bias[...].astype(jnp.float32)
        return x + self.pos_embedding[...].astype(jnp.float32)


def encoder_block(x: jax.Array, weights: dict) -> jax.Array:
    """One pre-norm layer on [b, tokens, width]; `weights` is one layer's slice of `_create_blocks`."""
    y = layer_norm(split_by_sample(x), **weights["LayerNorm_0"])
    attention = weights["MultiHeadDotProductAttention_0"]
    q, k, v = (
        jnp.einsum("btw,wnh->btnh", y, attention[name]["kernel"].astype(y.dtype))
        + attention[name]["bias"].astype(y.dtype)
        for name in ("query", "key", "value")
    )
    y = full_attention(q, k, v)
    out = attention["out"]
    x = x + jnp.einsum("btnh,nhw->btw", y, out["kernel"].astype(y.dtype)) + out["bias"].astype(y.dtype)
    y = layer_norm(x, **weights["LayerNorm_1"])
    y = jax.nn.gelu(_dense(y, **weights["MlpBlock_0"]["Dense_0"]))
    return split_by_sample(x + _dense(y, **weights["MlpBlock_0"]["Dense_1"]))


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """LayerNorm with float32 statistics and the one-pass variance with which openpi's weights were trained."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean), 0.0)
    multiplier = jax.lax.rsqrt(variance + _LAYER_NORM_EPS) * scale.astype(jnp.float32)
    return ((wide - mean) * multiplier + bias.astype(jnp.float32)).astype(x.dtype)


def _dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel.astype(x.dtype) + bias.astype(x.dtype)
