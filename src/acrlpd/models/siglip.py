"""SigLIP: the vision transformer that turns an image into tokens for the language model."""

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.families.pi0 import RematPolicy, SiglipConfig
from acrlpd.models.layers import full_attention, rematerialise, split_by_sample

_xavier = nnx.initializers.xavier_uniform(in_axis=-2, out_axis=-1, batch_axis=0)
_LAYER_NORM_EPS = 1e-6


class _Affine(nnx.Module):
    """kernel and bias, with any leading axes."""

    def __init__(self, kernel: jax.Array, bias: jax.Array):
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(bias)


class _LayerNorm(nnx.Module):
    def __init__(self, *shape: int):
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(shape, jnp.float32))


class _MlpBlock(nnx.Module):
    def __init__(self, config: SiglipConfig, rngs: nnx.Rngs):
        depth, width, mlp_dim = config.depth, config.width, config.mlp_dim
        small = nnx.initializers.normal(stddev=1e-6)
        for name, fan_in, fan_out in (("Dense_0", width, mlp_dim), ("Dense_1", mlp_dim, width)):
            kernel = _xavier(rngs.params(), (depth, fan_in, fan_out), jnp.float32)
            setattr(self, name, _Affine(kernel, small(rngs.params(), (depth, fan_out), jnp.float32)))


class _SelfAttention(nnx.Module):
    def __init__(self, config: SiglipConfig, rngs: nnx.Rngs):
        depth, width, heads = config.depth, config.width, config.num_heads
        head_dim = width // heads

        def kernel() -> jax.Array:  # fans of the flat [width, width] projection
            return _xavier(rngs.params(), (depth, width, width), jnp.float32)

        for name in ("query", "key", "value"):
            weights = kernel().reshape(depth, width, heads, head_dim)
            setattr(self, name, _Affine(weights, jnp.zeros((depth, heads, head_dim), jnp.float32)))
        self.out = _Affine(kernel().reshape(depth, heads, head_dim, width), jnp.zeros((depth, width), jnp.float32))


class _EncoderBlock(nnx.Module):
    """All layers' weights, stacked on a leading depth axis."""

    def __init__(self, config: SiglipConfig, rngs: nnx.Rngs):
        self.LayerNorm_0 = _LayerNorm(config.depth, config.width)
        self.LayerNorm_1 = _LayerNorm(config.depth, config.width)
        self.MultiHeadDotProductAttention_0 = _SelfAttention(config, rngs)
        self.MlpBlock_0 = _MlpBlock(config, rngs)


class _Transformer(nnx.Module):
    def __init__(self, config: SiglipConfig, rngs: nnx.Rngs):
        self.encoderblock = _EncoderBlock(config, rngs)
        self.encoder_norm = _LayerNorm(config.width)


class Siglip(nnx.Module):
    """Images [b, h, w, 3] in [-1, 1] to tokens [b, h/patch * w/patch, out_dim]."""

    def __init__(
        self,
        config: SiglipConfig,
        *,
        num_tokens: int,
        out_dim: int,
        dtype: jnp.dtype,
        remat_policy: RematPolicy,
        rngs: nnx.Rngs,
    ):
        width, patch = config.width, config.patch_size
        self.config = config
        self.dtype = dtype
        self.remat_policy = remat_policy
        self.embedding = _Affine(
            nnx.initializers.lecun_normal()(rngs.params(), (patch, patch, 3, width), jnp.float32),
            jnp.zeros((width,), jnp.float32),
        )
        # Positions start as large as patches, and the head does not start at zero; a checkpoint replaces both. With
        # openpi's own initial values (width**-0.5 and zero), a policy that starts from scratch does not learn to see:
        # the first norm of the language model turns tokens near zero into one direction, which hides what differs
        # between images, and hardly any gradient comes back to the layers here.
        init_position = nnx.initializers.normal(stddev=1.0)
        self.pos_embedding = nnx.Param(init_position(rngs.params(), (1, num_tokens, width), jnp.float32))
        self.Transformer = _Transformer(config, rngs)
        self.head = _Affine(
            nnx.initializers.lecun_normal()(rngs.params(), (width, out_dim), jnp.float32),
            jnp.zeros((out_dim,), jnp.float32),
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed_patches(images).astype(self.dtype)
        blocks = nnx.to_pure_dict(nnx.state(self.Transformer.encoderblock, nnx.Param))
        step = rematerialise(lambda x, weights: (encoder_block(x, weights), None), self.remat_policy)
        x, _ = jax.lax.scan(step, x, blocks)
        norm = self.Transformer.encoder_norm
        x = layer_norm(x, norm.scale[...], norm.bias[...])
        return _dense(x, self.head.kernel[...], self.head.bias[...])

    def embed_patches(self, images: jax.Array) -> jax.Array:
        """Patches in row-major order, projected and placed, in float32: [b, tokens, width]."""
        b, h, w, c = images.shape
        patch = self.config.patch_size
        rows, columns = h // patch, w // patch
        if rows * columns != self.pos_embedding.shape[1]:
            raise ValueError(
                f"image is {h}x{w}: {rows * columns} patches of {patch}x{patch}, but the position embedding has "
                f"{self.pos_embedding.shape[1]}; resize the image to the model's image_resolution"
            )
        # A stride-equals-size convolution is one matrix product over flattened patches.
        x = images[:, : rows * patch, : columns * patch].astype(jnp.float32)
        x = x.reshape(b, rows, patch, columns, patch, c).transpose(0, 1, 3, 2, 4, 5)
        kernel = self.embedding.kernel[...].astype(jnp.float32).reshape(patch * patch * c, -1)
        x = x.reshape(b, rows * columns, -1) @ kernel + self.embedding.bias[...].astype(jnp.float32)
        return x + self.pos_embedding[...].astype(jnp.float32)


def encoder_block(x: jax.Array, weights: dict) -> jax.Array:
    """One pre-norm layer on [b, tokens, width]; `weights` is one layer's slice of `_EncoderBlock`."""
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
    """LayerNorm with float32 statistics and the one-pass variance that openpi's weights saw."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean), 0.0)
    multiplier = jax.lax.rsqrt(variance + _LAYER_NORM_EPS) * scale.astype(jnp.float32)
    return ((wide - mean) * multiplier + bias.astype(jnp.float32)).astype(x.dtype)


def _dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel.astype(x.dtype) + bias.astype(x.dtype)
