"""pi0 and pi0.5: a vision-language model that denoises action chunks by flow matching."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.gemma import Gemma, LayerWeights
from acrlpd.models.layers import weights_are_split
from acrlpd.models.observation import Observation, to_float_image
from acrlpd.models.paligemma_config import PaliGemmaConfig
from acrlpd.models.paligemma_sizes import BackboneConfig
from acrlpd.models.policy import ENCODE, Context, Features, FlowPolicy
from acrlpd.models.siglip import Siglip

_CONTEXT_ALIGNMENT = 64  # tokens


class PaliGemma(nnx.Module):
    """The language model and the image encoder, under openpi's names."""

    def __init__(self, config: BackboneConfig, rngs: nnx.Rngs):
        self.llm = Gemma(config, rngs)
        self.img = Siglip(config, rngs)


def move_valid_tokens_first(tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [b, s, width] with the valid ones first, the place that each token had [b, s], and how many are valid [b].

    Attention depends on positions, not on order, and fused kernels take a length instead of a mask.
    """
    order = jnp.argsort(~mask, axis=-1, stable=True)
    return jnp.take_along_axis(tokens, order[..., None], axis=1), order, jnp.sum(mask, axis=-1, dtype=jnp.int32)


def refuse_other_images(observation: Observation, config: PaliGemmaConfig) -> None:
    """Raises an error for images of another size than the policy reads."""
    for key in config.image_keys:
        shape = observation.images[key].shape
        if shape[1:] != (*config.image_resolution, 3):
            expected = f"[b, {config.image_resolution[0]}, {config.image_resolution[1]}, 3]"
            raise ValueError(f"image {key} must be {expected}; found {shape}. Use preprocess_observation")


class Pi0(FlowPolicy):
    """The policy. Its parameter tree has openpi's names and shapes."""

    config: Pi0Config

    def __init__(self, config: Pi0Config, rngs: nnx.Rngs):
        super().__init__(config)
        width, action_dim = config.action_expert.width, config.action_dim
        self.PaliGemma = PaliGemma(config, rngs)
        self.action_in_proj = nnx.Linear(action_dim, width, rngs=rngs)
        if config.pi05:
            self.time_mlp_in = nnx.Linear(width, width, rngs=rngs)
            self.time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        else:
            self.state_proj = nnx.Linear(action_dim, width, rngs=rngs)
            self.action_time_mlp_in = nnx.Linear(2 * width, width, rngs=rngs)
            self.action_time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        self.action_out_proj = nnx.Linear(width, action_dim, rngs=rngs)

    @jax.named_scope(ENCODE)
    def encode(self, observation: Observation, *, features: bool = True) -> Context:
        """Runs SigLIP and the first expert once, and keeps what the action tokens attend to.

        pi0's state token sees only the prefix and itself, so it belongs to the context.
        """
        tokens, _, length = move_valid_tokens_first(*self.embed_prefix(observation))
        llm = self.PaliGemma.llm
        out, cache = llm.run_prefix(tokens, length, kv_only=not features)
        if not self.config.pi05:
            _, k, v = llm.run_suffix(self.embed_state(observation)[:, None], cache)
            cache = cache.prepend(k[:, :, 0], v[:, :, 0])
        seen = None if out is None else Features(out, length)
        return Context(features=seen, memory=cache.pad_to_multiple(_CONTEXT_ALIGNMENT))

    def velocity(
        self, context: Context, x_t: jax.Array, time: jax.Array, layers: list[LayerWeights] | None = None
    ) -> jax.Array:
        tokens, condition = self.embed_actions(x_t, time)
        out, _, _ = self.PaliGemma.llm.run_suffix(tokens, context.memory, condition=condition, layers=layers)
        return self.action_out_proj(out)

    def velocity_fn(self, context: Context) -> Callable[[jax.Array, jax.Array], jax.Array]:
        # Sampling runs the action expert many times. Its weights are laid out once, outside of that loop, unless FSDP
        # splits them: the layout would put the whole expert on every device.
        layers = None if weights_are_split() else self.PaliGemma.llm.unstack(1)
        return lambda x_t, time: self.velocity(context, x_t, time, layers)

    def embed_prefix(self, observation: Observation) -> tuple[jax.Array, jax.Array]:
        """Image and prompt tokens [b, s, width], and which of them are valid [b, s].

        Only the cameras in `config.image_keys` are read; their images go through SigLIP together.
        """
        self._refuse_other_shapes(observation)
        keys, prompt = self.config.image_keys, observation.tokenized_prompt
        tokens, masks = [], []
        if keys:
            images = jnp.concatenate([to_float_image(jnp.asarray(observation.images[key])) for key in keys])
            image_tokens = self.PaliGemma.img(images)
            tokens += jnp.split(image_tokens, len(keys))
            per_image = (observation.state.shape[0], image_tokens.shape[1])
            masks += [jnp.broadcast_to(observation.image_masks[key][:, None], per_image) for key in keys]
        if prompt is not None:
            tokens.append(self.PaliGemma.llm.embed(jnp.asarray(prompt)))
            masks.append(jnp.asarray(observation.tokenized_prompt_mask))
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(masks, axis=1)

    def _refuse_other_shapes(self, observation: Observation) -> None:
        config = self.config
        refuse_other_images(observation, config)
        if observation.state.shape[-1] != config.action_dim:
            raise ValueError(f"state must be padded to action_dim {config.action_dim}; found {observation.state.shape}")
        prompt = observation.tokenized_prompt
        if prompt is not None and prompt.shape[-1] != config.max_token_len:
            raise ValueError(
                f"tokenized_prompt must have max_token_len = {config.max_token_len} tokens; found {prompt.shape}"
            )
        if prompt is None and not config.image_keys:
            raise ValueError("the observation has neither images nor a prompt: the prefix would be empty")

    def embed_state(self, observation: Observation) -> jax.Array:
        """pi0's state token, [b, 1, width]."""
        return self.state_proj(jnp.asarray(observation.state))[:, None]

    def embed_actions(self, x_t: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Action tokens [b, n, T, width] for x_t at times [b, n], and pi0.5's adaRMS condition [b, n, width]."""
        self.refuse_other_chunks(x_t)
        tokens = self.action_in_proj(x_t)
        time_embedding = embed_time(time, tokens.shape[-1])
        if self.config.pi05:
            condition = nnx.swish(self.time_mlp_in(time_embedding))
            return tokens, nnx.swish(self.time_mlp_out(condition))
        time_tokens = jnp.broadcast_to(time_embedding[:, :, None], tokens.shape)
        tokens = self.action_time_mlp_in(jnp.concatenate([tokens, time_tokens], axis=-1))
        return self.action_time_mlp_out(nnx.swish(tokens)), None


def embed_time(time: jax.Array, width: int) -> jax.Array:
    """Sine and cosine features of flow time, periods geometric from 4e-3 to 4: float32 [..., width]."""
    fraction = jnp.linspace(0.0, 1.0, width // 2)
    period = 4e-3 * (4.0 / 4e-3) ** fraction
    angle = time[..., None] * (1.0 / period * 2 * jnp.pi)  # as openpi rounds: angles reach 1570 radians
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
