"""pi0 and pi0.5 as plain data: sizes, frozen parameters, checks, memory, and what openpi calls them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import jax
from annotated_types import Ge
from flax import nnx

from acrlpd.findings import Finding, error, warning
from acrlpd.models.families.base import RELEASED_WEIGHTS, WorkingMemory, named_params
from acrlpd.models.paligemma_config import IMAGE_KEYS, PaliGemmaConfig
from acrlpd.models.paligemma_sizes import DTYPE_BYTES, FLOAT32, GemmaConfig, LayerBytes

if TYPE_CHECKING:
    from acrlpd.models.pi0 import Pi0

# Names of parameters, '/'-joined.
_LLM = ".*llm.*"
_ACTION_EXPERT = ".*llm.*_1.*"
_LORA = ".*lora.*"
_PROJECTIONS = r"(state_proj|action_in_proj|action_out_proj|action_time_mlp_.*|time_mlp_.*)/.*"


@dataclasses.dataclass(frozen=True)
class Pi0Config(PaliGemmaConfig):
    """openpi's Pi0Config, and fields for what openpi leaves hard-coded."""

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

    in_openpi_pytorch: ClassVar[bool] = True
    pads_actions: ClassVar[bool] = True
    expert_fields = ("paligemma_variant", "action_expert_variant")
    released_sizes: ClassVar[Mapping[str, Any]] = {**PaliGemmaConfig.released_sizes, "action_dim": 32}
    openpi_class = "pi0_config.Pi0Config"
    openpi_fields = (*PaliGemmaConfig.openpi_fields, "pi05", "discrete_state_input")
    openpi_variants = ("dummy", "gemma_300m", "gemma_300m_lora", "gemma_2b", "gemma_2b_lora")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_token_len is None:
            object.__setattr__(self, "max_token_len", 200 if self.pi05 else 48)
        if self.discrete_state_input is None:
            object.__setattr__(self, "discrete_state_input", self.pi05)
        first, second = self.experts
        for field in ("depth", "num_heads", "head_dim"):
            if getattr(first, field) != getattr(second, field):
                raise ValueError(
                    f"the experts share their attention, so {field} must agree: {self.paligemma_variant} has "
                    f"{getattr(first, field)}, {self.action_expert_variant} has {getattr(second, field)}"
                )
        if self.image_keys != tuple(key for key in IMAGE_KEYS if key in self.image_keys):
            raise ValueError(f"image_keys must be a subset of {IMAGE_KEYS} in that order; found {self.image_keys}")

    def implied_changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Token length and state input follow `pi05` when a config is changed."""
        if given.get("pi05", self.pi05) == self.pi05:
            return {}
        return {"max_token_len": None, "discrete_state_input": None}

    @property
    def action_expert(self) -> GemmaConfig:
        return self.experts[1]

    @property
    def adaptive_experts(self) -> tuple[bool, ...]:
        return False, self.pi05

    @property
    def prompt_len(self) -> int:
        """`max_token_len` with its default resolved."""
        assert self.max_token_len is not None
        return self.max_token_len

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
        yield from self.check_released_sizes(weights)
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

    def lighter_changes(self, *, freeze_pi0_backbone: bool) -> Iterator[Mapping[str, Any]]:
        """Adapters in the first expert, then a frozen backbone."""
        yield from super().lighter_changes(freeze_pi0_backbone=freeze_pi0_backbone)
        if not freeze_pi0_backbone:
            yield {"freeze_pi0_backbone": True}

    # -- openpi

    def openpi_differences(self) -> Iterator[str]:
        """A state in the prompt of pi0, and openpi's rounding."""
        yield from super().openpi_differences()
        if self.discrete_state_input and not self.pi05:
            yield "This policy reads the state in its prompt, which openpi writes there for pi0.5 only."
        if self.dtype == "float32":
            yield (
                "openpi rounds all weights to bfloat16 when it loads them. `acrlpd serve` keeps the float32 weights of "
                "this policy, so the actions differ a little; `acrlpd export --dtype bfloat16` rounds them for both."
            )
