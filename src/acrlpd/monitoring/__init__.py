"""Looking at a run: its report, device memory, the structure of its state.

Names are resolved lazily, so that reading a finished run does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acrlpd.monitoring.anomalies import AnomalyDetector as AnomalyDetector
    from acrlpd.monitoring.anomalies import suggest_lr_adjustment as suggest_lr_adjustment
    from acrlpd.monitoring.memory import GPUMemoryMonitor as GPUMemoryMonitor
    from acrlpd.monitoring.memory import log_memory_usage as log_memory_usage
    from acrlpd.monitoring.pytree_checks import check_optimizer_consistency as check_optimizer_consistency
    from acrlpd.monitoring.pytree_checks import check_pytree_leaf_dtypes as check_pytree_leaf_dtypes
    from acrlpd.monitoring.pytree_checks import compare_pytree_structures as compare_pytree_structures
    from acrlpd.monitoring.pytree_checks import diagnose_pytree_structure as diagnose_pytree_structure
    from acrlpd.monitoring.pytree_checks import validate_fsdp_compatibility as validate_fsdp_compatibility
    from acrlpd.monitoring.report import generate_training_report as generate_training_report
    from acrlpd.monitoring.run_monitor import RunMonitor as RunMonitor

_HOME = {
    "AnomalyDetector": "anomalies",
    "GPUMemoryMonitor": "memory",
    "RunMonitor": "run_monitor",
    "log_memory_usage": "memory",
    "check_optimizer_consistency": "pytree_checks",
    "check_pytree_leaf_dtypes": "pytree_checks",
    "compare_pytree_structures": "pytree_checks",
    "diagnose_pytree_structure": "pytree_checks",
    "validate_fsdp_compatibility": "pytree_checks",
    "generate_training_report": "report",
    "suggest_lr_adjustment": "anomalies",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
