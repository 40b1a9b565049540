"""The networks. Names are resolved lazily, so that reading a config does not import JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acrlpd.models.flow_policy import StateFlowPolicy as StateFlowPolicy
    from acrlpd.models.flow_policy_config import StateFlowPolicyConfig as StateFlowPolicyConfig
    from acrlpd.models.image_preprocessing import preprocess_observation as preprocess_observation
    from acrlpd.models.observation import IMAGE_KEYS as IMAGE_KEYS
    from acrlpd.models.observation import IMAGE_RESOLUTION as IMAGE_RESOLUTION
    from acrlpd.models.observation import Observation as Observation
    from acrlpd.models.openpi_checkpoint import load_pi0_weights_from_openpi as load_pi0_weights_from_openpi
    from acrlpd.models.openpi_checkpoint import restore_params as restore_params
    from acrlpd.models.openpi_checkpoint import save_openpi_pi0_checkpoint as save_openpi_pi0_checkpoint
    from acrlpd.models.openpi_checkpoint import (
        verify_openpi_checkpoint_compatibility as verify_openpi_checkpoint_compatibility,
    )
    from acrlpd.models.pi0 import Pi0 as Pi0
    from acrlpd.models.pi0_config import Pi0Config as Pi0Config
    from acrlpd.models.policy import Context as Context
    from acrlpd.models.policy import FlowPolicy as FlowPolicy

_HOME = {
    "StateFlowPolicy": "flow_policy",
    "StateFlowPolicyConfig": "flow_policy_config",
    "preprocess_observation": "image_preprocessing",
    "IMAGE_KEYS": "observation",
    "IMAGE_RESOLUTION": "observation",
    "Observation": "observation",
    "load_pi0_weights_from_openpi": "openpi_checkpoint",
    "restore_params": "openpi_checkpoint",
    "save_openpi_pi0_checkpoint": "openpi_checkpoint",
    "verify_openpi_checkpoint_compatibility": "openpi_checkpoint",
    "Pi0": "pi0",
    "Pi0Config": "pi0_config",
    "Context": "policy",
    "FlowPolicy": "policy",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
