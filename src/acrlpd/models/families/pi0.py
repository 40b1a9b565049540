"""pi0 and pi0.5 as plain data: sizes, frozen parameters, checks, memory, and what openpi calls them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import jax
from annotated_types import Ge
from flax import nnx

from acrlpd.findings import Finding, error, warning
from acrlpd.models.families.base import RELEASED_WEIGHTS, PolicyConfig, WorkingMemory, named_params
from acrlpd.models.paligemma_sizes import (
    DTYPE_BYTES,
    FLOAT32,
    GEMMA_VARIANTS,
    SIGLIP_VARIANTS,
    DType,
    GemmaConfig,
    LayerBytes,
    RematPolicy,
    SiglipConfig,
)

if TYPE_CHECKING:
    from acrlpd.models.pi0 import Pi0

# openpi's camera slots, in the order in which their tokens enter the prefix.
IMAGE_KEYS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")

# Fields whose defaults released weights need.
_FIXED_BY_RELEASED_WEIGHTS = ("action_dim", "vocab_size", "siglip_variant")

# Fields of openpi's Pi0Config, fields that openpi leaves hard-coded, and the variants that openpi knows.
_EXPERTS = ("paligemma_variant", "action_expert_variant")
_IN_OPENPI = ("pi05", "action_dim", "action_horizon", "max_token_len", "discrete_state_input", "dtype", *_EXPERTS)
_NOT_IN_OPENPI = ("siglip_variant", "vocab_size", "image_resolution")
_OPENPI_VARIANTS = ("dummy", "gemma_300m", "gemma_300m_lora", "gemma_2b", "gemma_2b_lora")

# Names of parameters, '/'-joined.
_LLM = ".*llm.*"
_ACTION_EXPERT = ".*llm.*_1.*"
_LORA = ".*lora.*"
_PROJECTIONS = r"(state_proj|action_in_proj|action_out_proj|action_time_mlp_.*|time_mlp_.*)/.*"


@dataclasses.dataclass(frozen=True)
class Pi0Config(PolicyConfig):
    """openpi's Pi0Config, and fields for what openpi leaves hard-coded."""

    # Compute precision; parameters are float32 unless frozen.
    dtype: DType = "bfloat16"
    # The expert that reads images and prompt. A `_lora` variant trains only adapters in it.
    paligemma_variant: str = "gemma_2b"
    # The expert that reads state and noisy actions.
    action_expert_variant: str = "gemma_300m"
    # Width to which states and actions are padded; released weights need 32.
    action_dim: Annotated[int, Ge(1)] = 32
    # Steps in one action chunk.
    action_horizon: Annotated[int, Ge(1)] = 50
    # Prompt tokens, padded or truncated to this; None: 48 for pi0, 200 for pi0.5.
    max_token_len: Annotated[int | None, Ge(1)] = None
    # pi0.5: adaRMS conditioning on flow time, state as prompt tokens.
    pi05: bool = False
    # Whether the state is written into the prompt; None: as `pi05`.
    discrete_state_input: bool | None = None
    # Image encoder; released weights need So400m/14.
    siglip_variant: str = "So400m/14"
    # Rows of the embedding table; released weights need PaliGemma's 257152.
    vocab_size: Annotated[int, Ge(1)] = 257_152
    # Height and width to which images are resized (with padding).
    image_resolution: tuple[int, int] = (224, 224)
    # Cameras that this policy is given, in openpi's order. A camera that is not listed costs nothing.
    image_keys: tuple[str, ...] = IMAGE_KEYS
    # What the backward pass recomputes: "full" saves memory, "none" saves time, "dots" keeps matrix products.
    remat_policy: RematPolicy = "full"

    in_openpi: ClassVar[bool] = True
    in_openpi_pytorch: ClassVar[bool] = True
    pads_actions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_token_len is None:
            object.__setattr__(self, "max_token_len", 200 if self.pi05 else 48)
        if self.discrete_state_input is None:
            object.__setattr__(self, "discrete_state_input", self.pi05)
        variants = {**dict.fromkeys(_EXPERTS, tuple(GEMMA_VARIANTS)), "siglip_variant": tuple(SIGLIP_VARIANTS)}
        for name, known in variants.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {getattr(self, name)!r}")
        first, second = self.paligemma, self.action_expert
        for field in ("depth", "num_heads", "head_dim"):
            if getattr(first, field) != getattr(second, field):
                raise ValueError(
                    f"the experts share their attention, so {field} must agree: {self.paligemma_variant} has "
                    f"{getattr(first, field)}, {self.action_expert_variant} has {getattr(second, field)}"
                )
        if self.siglip.patch_size > min(self.image_resolution):
            raise ValueError(f"image_resolution {self.image_resolution} is smaller than one patch")
        if self.image_keys != tuple(key for key in IMAGE_KEYS if key in self.image_keys):
            raise ValueError(f"image_keys must be a subset of {IMAGE_KEYS} in that order; found {self.image_keys}")

    def implied_changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Token length and state input follow `pi05` when a config is changed."""
        if given.get("pi05", self.pi05) == self.pi05:
            return {}
        return {"max_token_len": None, "discrete_state_input": None}

    @property
    def paligemma(self) -> GemmaConfig:
        return GEMMA_VARIANTS[self.paligemma_variant]

    @property
    def action_expert(self) -> GemmaConfig:
        return GEMMA_VARIANTS[self.action_expert_variant]

    @property
    def experts(self) -> tuple[GemmaConfig, ...]:
        return self.paligemma, self.action_expert

    @property
    def adaptive_experts(self) -> tuple[bool, ...]:
        return False, self.pi05

    @property
    def siglip(self) -> SiglipConfig:
        return SIGLIP_VARIANTS[self.siglip_variant]

    @property
    def tokens_per_image(self) -> int:
        patch = self.siglip.patch_size
        return (self.image_resolution[0] // patch) * (self.image_resolution[1] // patch)

    @property
    def prompt_len(self) -> int:
        """`max_token_len` with its default resolved."""
        assert self.max_token_len is not None
        return self.max_token_len

    @property
    def feature_dim(self) -> int:
        """The critics get the first expert's output."""
        return self.paligemma.width

    @property
    def use_quantile_norm(self) -> bool:
        """openpi normalises pi0.5 by quantiles."""
        return self.pi05

    # -- networks

    def create(self, rng: jax.Array) -> "Pi0":
        from acrlpd.models.pi0 import Pi0

        return Pi0(self, rngs=nnx.Rngs(rng))

    def get_freeze_filter(self, *, freeze_pi0_backbone: bool = False) -> nnx.filterlib.Filter:
        """Selects the parameters that do not train.

        LoRA freezes the language-model weights of the experts that carry adapters; a frozen backbone
        trains the action expert and the projections only.
        """
        llm, action_expert, lora, projections = map(named_params, (_LLM, _ACTION_EXPERT, _LORA, _PROJECTIONS))
        frozen: list[nnx.filterlib.Filter] = []
        if self.paligemma.lora:
            frozen.append(nnx.All(llm, nnx.Not(action_expert), nnx.Not(lora)))
        if self.action_expert.lora:
            frozen.append(nnx.All(action_expert, nnx.Not(lora)))
        if freeze_pi0_backbone:
            frozen.append(nnx.Not(nnx.Any(action_expert, projections)))
        return nnx.Any(*frozen) if frozen else nnx.Nothing()

    def merge_adapters(self, params: nnx.State) -> "tuple[Pi0Config, nnx.State]":
        """The policy without LoRA adapters; weights that an adapter changed are float32."""
        from acrlpd.models.lora import merge_adapters

        if not (self.paligemma.lora or self.action_expert.lora):
            raise ValueError("there are no adapters to merge: neither expert of this model is a LoRA variant")
        plain = {name: getattr(self, name).removesuffix("_lora") for name in _EXPERTS}
        merged = merge_adapters(params, (self.paligemma.lora, self.action_expert.lora))
        return dataclasses.replace(self, **plain), merged

    # -- checks

    def check(self, *, freeze_pi0_backbone: bool, weights: str | None) -> Iterator[Finding]:
        """Released weights need certain sizes, a frozen backbone leaves no adapter to train, prompts have a length."""
        if weights is not None and weights.startswith(RELEASED_WEIGHTS):
            yield from self._check_released_weights(weights)
        if freeze_pi0_backbone and self.paligemma.lora:
            yield error(
                f"freeze_pi0_backbone keeps {self.paligemma_variant} fixed, adapters included; use gemma_2b, "
                "or LoRA without freezing"
            )
        if self.discrete_state_input and self.prompt_len < 100:
            yield warning(
                f"the state takes about 4 prompt tokens per dim: max_token_len {self.prompt_len} may cut the "
                "prompt; released pi0.5 uses 200"
            )

    def _check_released_weights(self, weights: str) -> Iterator[Finding]:
        for name in _FIXED_BY_RELEASED_WEIGHTS:
            needed, found = getattr(Pi0Config, name), getattr(self, name)
            if found != needed:
                yield error(
                    f"model.{name} {found} does not fit the released weights {weights}; they need {needed}"
                    + (" (the robot's own is qchunking.action_dim)" if name == "action_dim" else "")
                )
        if weights.removeprefix(RELEASED_WEIGHTS).startswith("pi0_fast"):
            yield error(f"weight_loader: {weights} are of pi0-FAST; set model pi0_fast, or name weights of pi0")
        family = weights.removeprefix(RELEASED_WEIGHTS).partition("_")[0]
        if family in ("pi0", "pi05") and (family == "pi05") != self.pi05:
            yield error(f"model.pi05 is {self.pi05}, but {weights} are {family} weights")

    # -- the plan

    def working_memory(self, *, freeze_pi0_backbone: bool) -> WorkingMemory:
        """Counted per layer; compared with XLA's own analysis in benchmarks/plan_against_xla-*.md."""
        size = DTYPE_BYTES[self.dtype]
        first, second = self.paligemma, self.action_expert
        image_tokens = len(self.image_keys) * self.tokens_per_image
        prefix = image_tokens + self.prompt_len
        keys = prefix + (not self.pi05) + self.action_horizon
        images = LayerBytes.of(self.siglip, image_tokens, self.tokens_per_image, size)
        language = LayerBytes.of(first, prefix, prefix, size)
        actions = LayerBytes.of(second, self.action_horizon, keys, size)
        trained = [actions] if freeze_pi0_backbone else [images, language, actions]
        return WorkingMemory(
            kept=sum(layers.kept(self.remat_policy) for layers in trained),
            layer=max(layers.backward for layers in trained),
            context=2.0 * first.depth * prefix * first.head_dim * size,
            features=1.0 * prefix * first.width * size,
            candidate=actions.forward,
            encoding=max(images.forward, language.forward),
            # Denoising uses the action expert many times, so XLA keeps its float32 weights in bfloat16 as well.
            weight_copies=size * second.layer_weights * second.depth if size < FLOAT32 else 0,
            # The largest layer's weights are whole while the layer runs, and the next layer's are on their way.
            gathered_weights=2 * first.layer_weights * FLOAT32,
        )

    def layout_changes(self) -> Iterator[Mapping[str, Any]]:
        """Recompute everything in the backward pass."""
        if self.remat_policy != "full":
            yield {"model.remat_policy": "full"}

    def lighter_changes(self, *, freeze_pi0_backbone: bool) -> Iterator[Mapping[str, Any]]:
        """Adapters in the first expert, then a frozen backbone."""
        if freeze_pi0_backbone:
            return
        if f"{self.paligemma_variant}_lora" in GEMMA_VARIANTS:
            yield {"model.paligemma_variant": f"{self.paligemma_variant}_lora"}
        yield {"freeze_pi0_backbone": True}

    # -- openpi

    def openpi_call(self) -> str:
        """openpi's `Pi0Config` with this model's settings."""
        arguments = ", ".join(f"{field}={getattr(self, field)!r}" for field in _IN_OPENPI)
        return f"pi0_config.Pi0Config({arguments})"

    def openpi_differences(self) -> Iterator[str]:
        """Sizes that openpi fixes, a state in the prompt of pi0, and openpi's rounding."""
        foreign = [field for field in _NOT_IN_OPENPI if getattr(self, field) != getattr(Pi0Config, field)]
        foreign += [field for field in _EXPERTS if getattr(self, field) not in _OPENPI_VARIANTS]
        if foreign:
            settings = ", ".join(f"`{field}={getattr(self, field)!r}`" for field in foreign)
            yield f"openpi has no setting for {settings}: stock openpi cannot build this model."
        if self.discrete_state_input and not self.pi05:
            yield "This policy reads the state in its prompt, which openpi writes there for pi0.5 only."
        if self.dtype == "float32":
            yield (
                "openpi rounds all weights to bfloat16 when it loads them; `acrlpd serve` keeps the float32 weights of "
                "this policy, so the actions differ a little."
            )
