"""Which parameters stay as they are."""

import re

from flax import nnx

from acrlpd.models.families.pi0 import Pi0Config

_PROJECTIONS = re.compile(r"(state_proj|action_in_proj|action_out_proj|action_time_mlp_.*|time_mlp_.*)/.*")
_LLM = re.compile(r".*llm.*")
_ACTION_EXPERT = re.compile(r".*llm.*_1.*")
_LORA = re.compile(r".*lora.*")


def path_matches(pattern: re.Pattern[str]) -> nnx.filterlib.Predicate:
    """An nnx filter for parameters whose '/'-joined path matches the whole pattern."""
    return lambda path, _: pattern.fullmatch("/".join(map(str, path))) is not None


def freeze_filter(config: Pi0Config, *, freeze_pi0_backbone: bool) -> nnx.filterlib.Filter:
    llm, action_expert, lora = (path_matches(pattern) for pattern in (_LLM, _ACTION_EXPERT, _LORA))
    frozen: list[nnx.filterlib.Filter] = []
    if config.paligemma.lora:
        frozen.append(nnx.All(llm, nnx.Not(action_expert), nnx.Not(lora)))
    if config.action_expert.lora:
        frozen.append(nnx.All(action_expert, nnx.Not(lora)))
    if freeze_pi0_backbone:
        frozen.append(nnx.Not(nnx.Any(action_expert, path_matches(_PROJECTIONS))))
    return nnx.Any(*frozen) if frozen else nnx.Nothing()
