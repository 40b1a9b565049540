"""The sizes of PaliGemma's two networks, which pi0, pi0.5 and pi0-FAST share, and the memory of their layers."""

import dataclasses
from typing import Literal, Protocol

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
    num_heads: int  # of queries; all of them share one head of keys and values
    head_dim: int
    lora: LoRAConfig | None = None  # on attention and feed-forward weights

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices, without adapters."""
        attention = 2 * (self.num_heads + 1) * self.head_dim
        return self.width * (attention + 3 * self.mlp_dim)


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The image encoder."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int = 14


GEMMA_VARIANTS: dict[str, GemmaConfig] = {
    "dummy": GemmaConfig(64, 4, 128, 8, 16),
    "tiny": GemmaConfig(64, 2, 256, 4, 16),
    "small": GemmaConfig(256, 6, 1024, 4, 64),
    "gemma_300m": GemmaConfig(1024, 18, 4096, 8, 256),
    "gemma_2b": GemmaConfig(2048, 18, 16384, 8, 256),
    "dummy_lora": GemmaConfig(64, 4, 128, 8, 16, LoRAConfig(4, 8.0)),
    "gemma_300m_lora": GemmaConfig(1024, 18, 4096, 8, 256, LoRAConfig(32, 32.0)),
    "gemma_2b_lora": GemmaConfig(2048, 18, 16384, 8, 256, LoRAConfig(16, 16.0)),
}

# Names follow big_vision: a size and the patch edge.
SIGLIP_VARIANTS: dict[str, SiglipConfig] = {
    "mu/14": SiglipConfig(32, 1, 128, 2),
    "Ti/14": SiglipConfig(192, 12, 768, 3),
    "S/14": SiglipConfig(384, 12, 1536, 6),
    "B/14": SiglipConfig(768, 12, 3072, 12),
    "So400m/14": SiglipConfig(1152, 27, 4304, 16),
}


class BackboneConfig(Protocol):
    """What SigLIP and Gemma need to know of a policy family that is made of them."""

    @property
    def dtype(self) -> str: ...  # of matrix products
    @property
    def vocab_size(self) -> int: ...
    @property
    def remat_policy(self) -> RematPolicy: ...
    @property
    def siglip(self) -> SiglipConfig: ...
    @property
    def tokens_per_image(self) -> int: ...
    @property
    def experts(self) -> tuple[GemmaConfig, ...]: ...  # the first expert reads images and prompt
    @property
    def adaptive_experts(self) -> tuple[bool, ...]: ...  # whether the norms of an expert follow a condition (adaRMS)


FLOAT32 = 4
DTYPE_BYTES = {"bfloat16": 2, "float32": FLOAT32}


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """Arrays of one transformer layer over the tokens of one sample, in bytes, and the number of layers."""

    depth: int
    inputs: float
    norms: float  # float32 values inside of the norms
    projections: float  # queries, keys, values and the attention's output
    logits: float
    hidden: float  # before the activation; two halves where the layer has a gate

    @classmethod
    def of(cls, config: GemmaConfig | SiglipConfig, tokens: int, keys: int, dtype_bytes: int) -> "LayerBytes":
        """Gemma has one head of keys and values, float32 logits and a gate; SigLIP has none of the three."""
        if isinstance(config, GemmaConfig):
            heads, logit_bytes, halves = (config.num_heads + 2) * config.head_dim, FLOAT32, 2
        else:
            heads, logit_bytes, halves = 3 * config.width, dtype_bytes, 1
        return cls(
            depth=config.depth,
            inputs=tokens * config.width * dtype_bytes,
            norms=4.0 * tokens * config.width * FLOAT32,
            projections=float(tokens * (heads + config.width) * dtype_bytes),
            logits=float(tokens * keys * config.num_heads * logit_bytes),
            hidden=float(tokens * config.mlp_dim * halves * dtype_bytes),
        )

    @property
    def forward(self) -> float:
        """Working memory of one layer: the wider of attention and feed-forward."""
        return max(2 * self.logits, 1.5 * self.hidden)

    @property
    def backward(self) -> float:
        """The same for the layer's gradient: values and gradients side by side."""
        return max(4 * self.logits, 2 * self.hidden)

    def kept(self, remat_policy: RematPolicy) -> float:
        """Bytes kept for the backward pass: inputs of the layers, and what is not computed again."""
        per_layer = self.inputs
        if remat_policy != "full":
            per_layer += self.projections + self.hidden
        if remat_policy == "none":
            per_layer += self.norms + 3 * self.logits + 1.5 * self.hidden
        return self.depth * per_layer
