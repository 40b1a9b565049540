"""pi0-FAST as plain data: sizes, the tokenizer of its actions, checks, memory, and what openpi calls it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from flax import nnx

from acrlpd.findings import Finding, error, warning
from acrlpd.models.families.base import RELEASED_WEIGHTS, ActionEncoder, WorkingMemory, named_params
from acrlpd.models.observation import Observation
from acrlpd.models.paligemma_config import PaliGemmaConfig
from acrlpd.models.paligemma_sizes import DTYPE_BYTES, FLOAT32, LayerBytes

if TYPE_CHECKING:
    from acrlpd.models.pi0_fast import Pi0FAST

# Where the tokenizer lies below assets/ of a checkpoint. openpi has the released one already.
_TOKENIZER_ASSETS, _RELEASED_ASSETS = "fast_tokenizer", "fast_tokenizer_released"


@dataclasses.dataclass(frozen=True)
class Pi0FASTConfig(PaliGemmaConfig):
    """openpi's Pi0FASTConfig, and fields for what openpi leaves hard-coded. PaliGemma writes the actions, too."""

    # Real state and action dims: nothing is padded here. The network reads the state in its prompt.
    state_dim: Annotated[int, Ge(1)] = 32
    action_dim: Annotated[int, Ge(1)] = 32
    # Steps in one action chunk.
    action_horizon: Annotated[int, Ge(1)] = 32
    # Tokens of prompt, state and actions together. About 180 for one arm, 250 for two.
    max_token_len: Annotated[int, Ge(2)] = 250
    # How many of them are for actions; `acrlpd data fast_tokenizer` says how many are needed. The others are for the
    # prompt, in which the state takes about 4 tokens per dim. More: longer chunks fit, decoding takes longer at worst.
    max_action_tokens: Annotated[int, Ge(2)] = 120
    # The tokenizer of actions: a directory of `acrlpd data fast_tokenizer` or of the public processor; "released": the
    # public one in the cache directory; "byte": no merges, no file, for small models.
    fast_tokenizer: str = "released"
    # At which tokens are drawn. 0: the most probable ones, as openpi does, so that all candidates are equal. Higher:
    # more diverse candidates for best-of-N, more of them bad.
    temperature: Annotated[float, Ge(0)] = 0.0
    # openpi writes tokens one position further than openpi's training has them. False: so does this policy, as released
    # weights know it. True: training has the positions of writing, without which a policy from random weights fails.
    train_at_decode_positions: bool = False
    # Place of a black image among the images: openpi shows one where a robot lacks a camera, and released weights know
    # it (DROID 1, LIBERO 2). None: no black image.
    black_image_at: Annotated[int | None, Ge(0)] = None

    samples_tokens: ClassVar[bool] = True
    discrete_state_input = True
    openpi_class = "pi0_fast.Pi0FASTConfig"
    openpi_variants = ("dummy", "gemma_2b", "gemma_2b_lora")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_action_tokens >= self.max_token_len:
            raise ValueError(
                f"max_action_tokens {self.max_action_tokens} must leave tokens for the prompt, below max_token_len "
                f"{self.max_token_len}"
            )
        if len(set(self.image_keys)) < len(self.image_keys):
            raise ValueError(f"image_keys names a camera twice: {self.image_keys}")
        if self.black_image_at is not None and self.black_image_at > len(self.image_keys):
            raise ValueError(
                f"black_image_at must lie between 0 and the number of cameras, {len(self.image_keys)}; found "
                f"{self.black_image_at}"
            )

    @property
    def adaptive_experts(self) -> tuple[bool, ...]:
        return (False,)

    @property
    def prompt_len(self) -> int:
        return self.max_token_len - self.max_action_tokens

    @property
    def use_quantile_norm(self) -> bool:
        """Quantiles bring most actions into the range for which FAST was made."""
        return True

    @property
    def candidates_are_equal(self) -> bool:
        return self.temperature == 0

    @property
    def _has_released_tokenizer(self) -> bool:
        return self.fast_tokenizer == "released" or Path(self.fast_tokenizer).name == _RELEASED_ASSETS

    # -- networks and files

    def create(self, rng: jax.Array) -> "Pi0FAST":
        from acrlpd.models.pi0_fast import Pi0FAST

        return Pi0FAST(self, rngs=nnx.Rngs(rng))

    def create_action_encoder(self) -> ActionEncoder:
        """FAST tokens of chunks, as ids of the language model."""
        from acrlpd.models.fast_decoding import first_action_id, to_language_ids
        from acrlpd.models.fast_tokenizer import load_fast_tokenizer

        tokenizer = load_fast_tokenizer(self.fast_tokenizer)
        first_id = first_action_id(tokenizer.vocab_size, self.vocab_size)
        if first_id < 0:
            raise ValueError(
                f"model.vocab_size {self.vocab_size} has no room for the {tokenizer.vocab_size} tokens of "
                f"model.fast_tokenizer={self.fast_tokenizer}"
            )
        return ActionEncoder(
            encode=lambda chunks: [
                to_language_ids(np.array(ids, np.int64), self.vocab_size).tolist() for ids in tokenizer.encode(chunks)
            ],
            first_id=first_id,
            max_len=self.max_action_tokens,
        )

    def asset_files(self) -> dict[str, bytes]:
        """The tokenizer: with another one, the policy's tokens would mean other actions."""
        from acrlpd.models.fast_tokenizer import load_fast_tokenizer

        sizes = {"action_dim": self.action_dim, "time_horizon": self.action_horizon}
        files = load_fast_tokenizer(self.fast_tokenizer).files(**sizes)
        directory = _RELEASED_ASSETS if self._has_released_tokenizer else _TOKENIZER_ASSETS
        return {f"{directory}/{name}": content for name, content in files.items()}

    def with_assets(self, directory: Path) -> "Pi0FASTConfig":
        """This policy with the tokenizer that lies in the assets of its checkpoint."""
        for own in (directory / _TOKENIZER_ASSETS, directory / _RELEASED_ASSETS):
            if own.is_dir():
                return dataclasses.replace(self, fast_tokenizer=str(own))
        return self

    def without_files(self) -> "Pi0FASTConfig":
        return dataclasses.replace(self, fast_tokenizer="byte")

    def get_freeze_filter(self, *, freeze_pi0_backbone: bool = False) -> nnx.filterlib.Filter:
        """LoRA freezes the language model's own weights; there is no expert that a frozen backbone would leave."""
        if freeze_pi0_backbone:
            raise ValueError("freeze_pi0_backbone would freeze all of a pi0_fast policy; use gemma_2b_lora")
        return (
            nnx.All(named_params(".*llm.*"), nnx.Not(named_params(".*lora.*")))
            if self.paligemma.lora
            else nnx.Nothing()
        )

    # -- checks

    def check(self, *, freeze_pi0_backbone: bool, weights: str | None) -> Iterator[Finding]:
        """Released weights need certain sizes, random ones certain positions, and a frozen backbone leaves nothing."""
        if weights is None and not self.train_at_decode_positions:
            yield warning(
                "a pi0_fast policy that starts from random weights learns positions at which neither openpi nor acrlpd "
                "writes its tokens: set model.train_at_decode_positions true"
            )
        if weights is not None and weights.startswith(RELEASED_WEIGHTS):
            yield from self.check_released_sizes(weights)
            if not weights.removeprefix(RELEASED_WEIGHTS).startswith("pi0_fast"):
                yield error(
                    f"weight_loader: {weights} are not of pi0-FAST; name pi0_fast_base or pi0_fast_droid, or set model "
                    "pi0"
                )
        if freeze_pi0_backbone:
            yield error(
                "freeze_pi0_backbone would leave nothing of the pi0_fast policy to train; turn freeze_pi0_backbone "
                "off, and use model.paligemma_variant gemma_2b_lora to train less"
            )

    # -- the plan

    def working_memory(self, *, freeze_pi0_backbone: bool) -> WorkingMemory:
        """Counted per layer, as for pi0; logits over the whole vocabulary come on top."""
        size, config = DTYPE_BYTES[self.dtype], self.paligemma
        num_images = len(self.image_keys) + (self.black_image_at is not None)
        prefix, actions = num_images * self.tokens_per_image + self.prompt_len, self.max_action_tokens
        images = LayerBytes.of(self.siglip, num_images * self.tokens_per_image, self.tokens_per_image, size)
        language = LayerBytes.of(config, prefix, prefix, size)
        written = LayerBytes.of(config, actions, prefix + actions, size)
        logits = 1.0 * actions * self.vocab_size * FLOAT32
        cache = 2.0 * config.depth * config.head_dim * size
        return WorkingMemory(
            kept=sum(layers.kept(self.remat_policy) for layers in (images, language, written)) + 2 * logits,
            layer=max(images.backward, language.backward, written.backward, 2 * logits),
            context=prefix * cache,
            features=1.0 * prefix * config.width * size,
            candidate=actions * cache + 2.0 * self.vocab_size * FLOAT32,
            encoding=max(images.forward, language.forward),
            # Writing uses the language model many times, so its float32 weights are cast once.
            weight_copies=size * config.layer_weights * config.depth if size < FLOAT32 else 0,
            gathered_weights=2 * config.layer_weights * FLOAT32,
        )

    # -- openpi

    def openpi_differences(self) -> Iterator[str]:
        """The tokenizer, and how tokens are written."""
        yield from super().openpi_differences()
        if not self._has_released_tokenizer:
            yield (
                "openpi uses the public FAST tokenizer unless it is told otherwise. Copy "
                "`processing_action_tokenizer.py` of Hugging Face's physical-intelligence/fast into "
                f"`assets/{_TOKENIZER_ASSETS}`, and add the argument "
                "`fast_model_tokenizer_kwargs={'fast_tokenizer_path': ...}` with the path of that directory."
            )
        if self.temperature > 0:
            yield f"openpi takes the most probable tokens unless it is told to use temperature={self.temperature}."
        if self.train_at_decode_positions:
            yield (
                "This policy has learned the positions at which openpi writes tokens today. An openpi in which its "
                "issue 705 is resolved writes them one position earlier, and this policy fails there."
            )

    # -- examples of inputs

    def inputs_spec(self, batch_size: int = 1, *, labelled_prompts: bool = False) -> tuple[Observation, jax.Array]:
        """A training sample has the tokens of its chunk as well."""
        observation, actions = super().inputs_spec(batch_size, labelled_prompts=labelled_prompts)
        tokens = jax.eval_shape(lambda: jnp.ones((batch_size, self.max_action_tokens), jnp.int32))
        return dataclasses.replace(observation, action_tokens=tokens), actions
