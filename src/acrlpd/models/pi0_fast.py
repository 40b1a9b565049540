"""pi0-FAST: a vision-language model that writes action chunks as tokens, one after the other.

The tokens of a training sample are openpi's: images | "Task: ..., State: ...;\\n" | "Action: ", FAST tokens, "|", end.
The first two parts are the prefix, whose tokens see each other. The rest is written token by token, and the policy
learns to predict it. The prefix does not see the rest, so it is computed once, for the loss and for all candidates.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.augmentation import AugmentationLevel
from acrlpd.models.families.pi0_fast import Pi0FASTConfig
from acrlpd.models.fast_decoding import decode_tokens
from acrlpd.models.gemma import KVCache
from acrlpd.models.layers import weights_are_split
from acrlpd.models.observation import Observation, to_float_image
from acrlpd.models.pi0 import PaliGemma, move_valid_tokens_first, refuse_other_images
from acrlpd.models.policy import DENOISE, ENCODE, Context, Features, FlowPolicy

# The id at which a sequence of tokens ends, and the id that stands for no token: those of PaliGemma.
END, PADDING = 1, 0

# The next token [b, n] from its logits [b, n, vocabulary], and the number of tokens before it.
ChooseToken = Callable[[jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass
class Prefix:
    """The context of a policy that writes tokens."""

    cache: KVCache
    last: jax.Array  # [b, width] the output of the prefix at its last token, which predicts the first action token
    next_position: jax.Array  # int32 [b] of the token that follows the prefix
    action_tokens: jax.Array | None  # int32 [b, l] of the logged chunk, then PADDING; None where there is none


class Pi0FAST(FlowPolicy):
    """The policy. Its parameter tree has openpi's names and shapes."""

    config: Pi0FASTConfig

    def __init__(self, config: Pi0FASTConfig, rngs: nnx.Rngs):
        super().__init__(config)
        self.PaliGemma = PaliGemma(config, rngs)

    def preprocess(
        self,
        rng: jax.Array | None,
        observation: Observation,
        *,
        train: bool,
        level: AugmentationLevel = "standard",
    ) -> Observation:
        """As for pi0, but no image is masked: openpi shows this family a black image where a camera is missing."""
        observation = super().preprocess(rng, observation, train=train, level=level)
        masks = {key: jnp.ones_like(mask, jnp.bool_) for key, mask in observation.image_masks.items()}
        return dataclasses.replace(observation, image_masks=masks)

    @jax.named_scope(ENCODE)
    def encode(self, observation: Observation, *, features: bool = True) -> Context:
        """Runs SigLIP and Gemma over the prefix.

        Each token keeps the position it had: in openpi's training, what follows a masked image does not move up.
        """
        tokens, order, length = move_valid_tokens_first(*self.embed_prefix(observation))
        out, cache = self.PaliGemma.llm.run_prefix(tokens, length, positions=order)
        assert out is not None
        final = jnp.maximum(length - 1, 0)[:, None]
        prefix = Prefix(
            cache=cache,
            last=jnp.take_along_axis(out, final[..., None], axis=1)[:, 0],
            next_position=jnp.take_along_axis(order, final, axis=1)[:, 0] + 1,
            action_tokens=None if observation.action_tokens is None else jnp.asarray(observation.action_tokens),
        )
        return Context(features=Features(out, length) if features else None, memory=prefix)

    def embed_prefix(self, observation: Observation) -> tuple[jax.Array, jax.Array]:
        """Image and prompt tokens [b, s, width], and which of them are valid [b, s]."""
        self._refuse_other_shapes(observation)
        prompt = jnp.asarray(observation.tokenized_prompt)
        images, masks = [], []
        for key in self.config.image_keys:
            images.append(to_float_image(jnp.asarray(observation.images[key])))
            masks.append(jnp.asarray(observation.image_masks[key]))
        if self.config.black_image_at is not None:
            shape = (len(prompt), *self.config.image_resolution, 3)
            images.insert(self.config.black_image_at, jnp.full(shape, -1.0, jnp.float32))
            masks.insert(self.config.black_image_at, jnp.ones(len(prompt), jnp.bool_))
        tokens, valid = [], []
        if images:
            tokens = jnp.split(self.PaliGemma.img(jnp.concatenate(images)), len(images))
            valid = [jnp.broadcast_to(mask[:, None], tokens[0].shape[:2]) for mask in masks]
        tokens.append(self.PaliGemma.llm.embed(prompt))
        valid.append(jnp.asarray(observation.tokenized_prompt_mask))
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(valid, axis=1)

    def _refuse_other_shapes(self, observation: Observation) -> None:
        config = self.config
        if observation.tokenized_prompt is None or observation.tokenized_prompt.shape[-1] != config.prompt_len:
            found = None if observation.tokenized_prompt is None else observation.tokenized_prompt.shape
            raise ValueError(f"tokenized_prompt must have {config.prompt_len} tokens; found {found}")
        refuse_other_images(observation, config)

    # -- learning

    def token_outputs(self, prefix: Prefix) -> jax.Array:
        """Outputs [b, l, width] that predict the action tokens, each given the prefix and the tokens before it."""
        tokens = prefix.action_tokens
        if tokens is None:
            raise ValueError(
                "the observation has no action_tokens, which this policy learns from; the transforms of the data layer "
                "add them where there are actions"
            )
        llm = self.PaliGemma.llm
        first = prefix.next_position + (1 if self.config.train_at_decode_positions else 0)
        positions = first[:, None] + jnp.arange(tokens.shape[1] - 1)
        out, _, _ = llm.run_causal(llm.embed(tokens[:, :-1])[:, None], prefix.cache, positions)
        return jnp.concatenate([prefix.last[:, None], out[:, 0]], axis=1)

    def flow_matching_loss(self, context: Context, actions: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        """The policy's loss of cloning, which is no flow matching here: [b, T], all T numbers of a sample equal.

        The number is openpi's loss: the mean cross entropy of the tokens of the logged chunk, which are part of the
        context. actions, noise and time are not used.
        """
        log_probs = jax.nn.log_softmax(self.PaliGemma.llm.logits(self.token_outputs(context.memory)), axis=-1)
        tokens = context.memory.action_tokens
        counts = (tokens != PADDING).astype(jnp.float32)
        chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
        loss = -jnp.sum(chosen * counts, axis=-1) / jnp.maximum(jnp.sum(counts, axis=-1), 1.0)
        return jnp.broadcast_to(loss[:, None], actions.shape[:2])

    # -- acting

    @jax.named_scope(DENOISE)
    def denoise(self, context: Context, noise: jax.Array, *, num_steps: int = 10, remat: bool = False) -> jax.Array:
        """Chunks [b, n, T, a] from noise [b, n, T, a], of which the random numbers of each chunk's tokens are made.

        Nothing depends on `num_steps` and `remat`.
        """
        self.refuse_other_chunks(noise)
        tokens = self.generate(context.memory, noise.shape[1], self._chooser(noise))
        return decode_tokens(
            tokens,
            fast_tokenizer=self.config.fast_tokenizer,
            vocab_size=self.config.vocab_size,
            action_horizon=self.action_horizon,
            action_dim=self.action_dim,
        ).astype(noise.dtype)

    def velocity(self, context: Context, x_t: jax.Array, time: jax.Array) -> jax.Array:
        """The straight flow from noise to its chunk: one Euler step from t = 1 gives the chunk."""
        return x_t - self.denoise(context, x_t)

    def _chooser(self, noise: jax.Array) -> ChooseToken:
        """The most probable tokens, or tokens drawn at a temperature from keys that are bits of the noise."""
        temperature = self.config.temperature
        if temperature == 0:
            return lambda logits, _: jnp.argmax(logits, axis=-1)
        numbers = jnp.pad(noise.reshape(*noise.shape[:2], -1), [(0, 0), (0, 0), (0, 1)])[..., :2]
        bits = jax.lax.bitcast_convert_type(numbers.astype(jnp.float32), jnp.uint32)
        keys = jax.random.wrap_key_data(bits, impl="threefry2x32")

        def draw(key: jax.Array, logits: jax.Array, index: jax.Array) -> jax.Array:
            return jax.random.categorical(jax.random.fold_in(key, index), logits / temperature)

        return lambda logits, index: jax.vmap(jax.vmap(draw, (0, 0, None)), (0, 0, None))(keys, logits, index)

    def generate(self, prefix: Prefix, num_samples: int, choose: ChooseToken) -> jax.Array:
        """Writes n sequences of tokens after one prefix, int32 [b, n, max_action_tokens], until all have ended.

        As in openpi, the position after the prefix stays empty.
        """
        llm, width = self.PaliGemma.llm, self.config.max_action_tokens
        b, n = prefix.last.shape[0], num_samples
        # The weights are cast once, outside of the loop, unless FSDP splits them: each device would hold all of them.
        weights = None if weights_are_split() else llm.compute_weights(0)
        first = prefix.next_position + 1
        empty = jnp.zeros((*prefix.cache.k.shape[:2], n, width, prefix.cache.k.shape[-1]), prefix.cache.k.dtype)

        def write(carry: tuple, index: jax.Array) -> tuple:
            tokens, ended, out, k, v = carry
            token = choose(llm.logits(out), index).astype(jnp.int32)  # [b, n]
            tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, index, axis=2)
            x = llm.embed(token)[:, :, None]
            before = (k, v, index)
            out, k, v = llm.run_causal(x, prefix.cache, (first + index)[:, None], before=before, weights=weights)
            return tokens, ended | (token == END), out[:, :, 0], k, v

        def step(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
            return jax.lax.cond(jnp.all(carry[1]), lambda carry, _: carry, write, carry, index), None

        out = jnp.broadcast_to(prefix.last[:, None], (b, n, prefix.last.shape[-1]))
        start = (jnp.zeros((b, n, width), jnp.int32), jnp.zeros((b, n), jnp.bool_), out, empty, empty)
        return jax.lax.scan(step, start, jnp.arange(width))[0][0]
