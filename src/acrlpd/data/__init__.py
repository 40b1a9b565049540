"""Episodes in, batches out: sources, frame cache, windows, transforms, norm statistics, rewards.

Names are loaded when they are first used: the command line imports this package and must not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acrlpd.data.dataset import Dataset, open_dataset, write_norm_stats
    from acrlpd.data.loader import ACRLPDDataLoader, create_acrlpd_data_loader
    from acrlpd.data.norm_stats import NormStats, load_norm_stats, save_norm_stats
    from acrlpd.data.policy_transforms import PolicyTransforms, create_policy_transforms
    from acrlpd.data.source import DatasetError, Episode, EpisodeError, EpisodeSource, open_source

__all__ = [
    "ACRLPDDataLoader",
    "Dataset",
    "DatasetError",
    "Episode",
    "EpisodeError",
    "EpisodeSource",
    "NormStats",
    "PolicyTransforms",
    "create_acrlpd_data_loader",
    "create_policy_transforms",
    "load_norm_stats",
    "open_dataset",
    "open_source",
    "save_norm_stats",
    "write_norm_stats",
]

_MODULES = {
    "dataset": ("Dataset", "open_dataset", "write_norm_stats"),
    "loader": ("ACRLPDDataLoader", "create_acrlpd_data_loader"),
    "norm_stats": ("NormStats", "load_norm_stats", "save_norm_stats"),
    "policy_transforms": ("PolicyTransforms", "create_policy_transforms"),
    "source": ("DatasetError", "Episode", "EpisodeError", "EpisodeSource", "open_source"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
