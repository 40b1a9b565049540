"""What a pi0 / pi0.5 network is, as plain data: cheap to import, no JAX until something is built."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from acrlpd.models.families.base import PolicyConfig

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from acrlpd.models.pi0 import Pi0

DType = Literal["bfloat16", "float32"]
RematPolicy = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adaptation of one kind of weight; the update is scaled by alpha / rank."""

    rank: int
    alpha: float
    rslora: bool = False  # scale by alpha / sqrt(rank) instead

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank**0.5 if self.rslora else self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """One expert of the two-expert transformer."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoRAConfig | None = None  # on attention and feed-forward weights


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The image encoder."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int = 14


GEMMA_VARIANTS: dict[str, GemmaConfig] = {
    "dummy": GemmaConfig(64, 4, 128, 8, 1, 16),
    "tiny": GemmaConfig(64, 2, 256, 4, 1, 16),
    "small": GemmaConfig(256, 6, 1024, 4, 1, 64),
    "gemma_300m": GemmaConfig(1024, 18, 4096, 8, 1, 256),
    "gemma_2b": GemmaConfig(2048, 18, 16384, 8, 1, 256),
    "dummy_lora": GemmaConfig(64, 4, 128, 8, 1, 16, LoRAConfig(4, 8.0)),
    "gemma_300m_lora": GemmaConfig(1024, 18, 4096, 8, 1, 256, LoRAConfig(32, 32.0)),
    "gemma_2b_lora": GemmaConfig(2048, 18, 16384, 8, 1, 256, LoRAConfig(16, 16.0)),
}

# Names follow big_vision: a size and the patch edge.
SIGLIP_VARIANTS: dict[str, SiglipConfig] = {
    "mu/14": SiglipConfig(32, 1, 128, 2),
    "Ti/14": SiglipConfig(192, 12, 768, 3),
    "S/14": SiglipConfig(384, 12, 1536, 6),
    "B/14": SiglipConfig(768, 12, 3072, 12),
    "So400m/14": SiglipConfig(1152, 27, 4304, 16),
}

_IMAGE_KEYS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclasses.dataclass(frozen=True)
class Pi0Config(PolicyConfig):
    """openpi's Pi0Config, and what it leaves hard-coded."""

    # Compute precision; parameters are float32 unless frozen.
    dtype: DType = "bfloat16"
    # The expert that reads images and prompt. A `_lora` variant trains only adapters in it.
    paligemma_variant: str = "gemma_2b"
    # The expert that reads state and noisy actions.
    action_expert_variant: str = "gemma_300m"
    # Width to which states and actions are padded; released weights need 32.
    action_dim: int = 32
    # Steps in one action chunk.
    action_horizon: int = 50
    # Prompt tokens, padded or truncated to this; None: 48 for pi0, 200 for pi0.5.
    max_token_len: int | None = None
    # pi0.5: adaRMS conditioning on flow time, state as prompt tokens.
    pi05: bool = False
    # Whether the state is written into the prompt; None: as `pi05`.
    discrete_state_input: bool | None = None
    # Image encoder; released weights need So400m/14.
    siglip_variant: str = "So400m/14"
    # Rows of the embedding table; released weights need PaliGemma's 257152.
    vocab_size: int = 257_152
    # Height and width to which images are resized (with padding).
    image_resolution: tuple[int, int] = (224, 224)
    # Cameras this policy is given, in openpi's order. One that is not listed costs nothing.
    image_keys: tuple[str, ...] = _IMAGE_KEYS
    # What the backward pass recomputes: "full" saves memory, "none" saves time, "dots" keeps matrix products.
    remat_policy: RematPolicy = "full"

    in_openpi: ClassVar[bool] = True
    pads_actions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_token_len is None:
            object.__setattr__(self, "max_token_len", 200 if self.pi05 else 48)
        if self.discrete_state_input is None:
            object.__setattr__(self, "discrete_state_input", self.pi05)
        self._check()

    def implied_changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Token length and state input follow `pi05` when a config is changed."""
        if given.get("pi05", self.pi05) == self.pi05:
            return {}
        return {"max_token_len": None, "discrete_state_input": None}

    def _check(self) -> None:
        """Refuses sizes that cannot be built, before anything is."""
        for name, variant, known in (
            ("paligemma_variant", self.paligemma_variant, GEMMA_VARIANTS),
            ("action_expert_variant", self.action_expert_variant, GEMMA_VARIANTS),
            ("siglip_variant", self.siglip_variant, SIGLIP_VARIANTS),
        ):
            if variant not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {variant!r}")
        first, second = self.paligemma, self.action_expert
        for field in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(first, field) != getattr(second, field):
                raise ValueError(
                    f"the experts share their attention, so {field} must agree: {self.paligemma_variant} has "
                    f"{getattr(first, field)}, {self.action_expert_variant} has {getattr(second, field)}"
                )
        if first.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads must be 1, as in every released variant; found {first.num_kv_heads}")
        if self.siglip.patch_size > min(self.image_resolution):
            raise ValueError(f"image_resolution {self.image_resolution} is smaller than one patch")
        unknown = [key for key in self.image_keys if key not in _IMAGE_KEYS]
        if unknown or list(self.image_keys) != [key for key in _IMAGE_KEYS if key in self.image_keys]:
            raise ValueError(f"image_keys must be a subset of {_IMAGE_KEYS} in that order; found {self.image_keys}")
        for field in ("action_dim", "action_horizon", "max_token_len", "vocab_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1; found {getattr(self, field)}")

    @property
    def paligemma(self) -> GemmaConfig:
        return GEMMA_VARIANTS[self.paligemma_variant]

    @property
    def action_expert(self) -> GemmaConfig:
        return GEMMA_VARIANTS[self.action_expert_variant]

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
    def use_quantile_norm(self) -> bool:
        """openpi normalises pi0.5 by quantiles."""
        return self.pi05

    def create(self, rng: "jax.Array") -> "Pi0":
        """A freshly initialised model; under `jax.eval_shape` or `jit` with shardings nothing is copied."""
        from flax import nnx

        from acrlpd.models.pi0 import Pi0

        return Pi0(self, rngs=nnx.Rngs(rng))

    def get_freeze_filter(self, *, freeze_pi0_backbone: bool = False) -> "nnx.filterlib.Filter":
        """Selects the parameters that do not train.

        LoRA freezes the language-model weights of the experts that carry adapters; a frozen backbone
        trains the action expert and the projections only.
        """
        from acrlpd.models.freeze import freeze_filter

        return freeze_filter(self, freeze_pi0_backbone=freeze_pi0_backbone)
