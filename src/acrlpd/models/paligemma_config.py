"""What the families pi0 and pi0_fast have in common as plain data: PaliGemma, which reads images and prompt."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge
from flax import nnx

from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.paligemma_sizes import (
    GEMMA_VARIANTS,
    SIGLIP_VARIANTS,
    DType,
    GemmaConfig,
    RematPolicy,
    SiglipConfig,
)

# openpi's camera slots, in the order in which their tokens enter the prefix.
IMAGE_KEYS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
# Fields that openpi leaves hard-coded.
_NOT_IN_OPENPI = ("siglip_variant", "vocab_size", "image_resolution")


@dataclasses.dataclass(frozen=True)
class PaliGemmaConfig(PolicyConfig):
    """Settings, checks and openpi's names of a policy on PaliGemma; each family adds how actions are made."""

    # Compute precision; parameters are float32 unless frozen.
    dtype: DType = "bfloat16"
    # The language model, which reads images and prompt. A `_lora` variant trains only adapters in it.
    paligemma_variant: str = "gemma_2b"
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
    # The fields that name a transformer, PaliGemma's first.
    expert_fields: ClassVar[tuple[str, ...]] = ("paligemma_variant",)
    # What released weights need.
    released_sizes: ClassVar[Mapping[str, Any]] = {"vocab_size": 257_152, "siglip_variant": "So400m/14"}
    # The class of this family's config in openpi, its fields beside the transformers, and the transformers it knows.
    openpi_class: ClassVar[str]
    openpi_fields: ClassVar[tuple[str, ...]] = ("dtype", "action_dim", "action_horizon", "max_token_len")
    openpi_variants: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        variants = {
            **dict.fromkeys(self.expert_fields, tuple(GEMMA_VARIANTS)),
            "siglip_variant": tuple(SIGLIP_VARIANTS),
        }
        for name, known in variants.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {getattr(self, name)!r}")
        if self.siglip.patch_size > min(self.image_resolution):
            raise ValueError(f"image_resolution {self.image_resolution} is smaller than one patch")

    @property
    def experts(self) -> tuple[GemmaConfig, ...]:
        return tuple(GEMMA_VARIANTS[getattr(self, name)] for name in self.expert_fields)

    @property
    def paligemma(self) -> GemmaConfig:
        return self.experts[0]

    @property
    def siglip(self) -> SiglipConfig:
        return SIGLIP_VARIANTS[self.siglip_variant]

    @property
    def tokens_per_image(self) -> int:
        patch = self.siglip.patch_size
        return (self.image_resolution[0] // patch) * (self.image_resolution[1] // patch)

    @property
    def feature_dim(self) -> int:
        """The critics get PaliGemma's outputs."""
        return self.paligemma.width

    def merge_adapters(self, params: nnx.State) -> tuple[Self, nnx.State]:
        """The policy without LoRA adapters; weights that an adapter changed are float32."""
        from acrlpd.models.lora import merge_adapters

        adapters = [expert.lora for expert in self.experts]
        if not any(adapters):
            raise ValueError(f"there are no adapters to merge: {' and '.join(self.expert_fields)} name no LoRA variant")
        plain = {name: getattr(self, name).removesuffix("_lora") for name in self.expert_fields}
        return dataclasses.replace(self, **plain), merge_adapters(params, adapters)

    def check_released_sizes(self, weights: str) -> Iterator[Finding]:
        """Errors about fields that do not fit openpi's released weights."""
        for name, needed in self.released_sizes.items():
            found = getattr(self, name)
            if found != needed:
                yield error(
                    f"model.{name} {found} does not fit the released weights {weights}; they need {needed}"
                    + (" (the robot's own is qchunking.action_dim)" if name == "action_dim" else "")
                )

    def layout_changes(self) -> Iterator[Mapping[str, Any]]:
        """Recompute everything in the backward pass."""
        if self.remat_policy != "full":
            yield {"model.remat_policy": "full"}

    def lighter_changes(self, *, freeze_pi0_backbone: bool) -> Iterator[Mapping[str, Any]]:
        """Adapters in the language model."""
        if f"{self.paligemma_variant}_lora" in GEMMA_VARIANTS and not freeze_pi0_backbone:
            yield {"model.paligemma_variant": f"{self.paligemma_variant}_lora"}

    def openpi_call(self) -> str:
        """The expression that makes this model in a TrainConfig of openpi."""
        fields = (*self.expert_fields, *self.openpi_fields)
        arguments = ", ".join(f"{field}={getattr(self, field)!r}" for field in fields)
        return f"{self.openpi_class}({arguments})"

    def openpi_differences(self) -> Iterator[str]:
        """Sizes that openpi fixes."""
        foreign = [field for field in _NOT_IN_OPENPI if getattr(self, field) != getattr(PaliGemmaConfig, field)]
        foreign += [field for field in self.expert_fields if getattr(self, field) not in self.openpi_variants]
        if foreign:
            settings = ", ".join(f"`{field}={getattr(self, field)!r}`" for field in foreign)
            yield f"openpi has no setting for {settings}: stock openpi cannot build this model."
