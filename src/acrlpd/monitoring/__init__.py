"""Looking at a run: device memory and the structure of its state."""

from acrlpd.monitoring.memory import GPUMemoryMonitor, log_memory_usage
from acrlpd.monitoring.pytree_checks import (
    check_optimizer_consistency,
    check_pytree_leaf_dtypes,
    compare_pytree_structures,
    diagnose_pytree_structure,
    validate_fsdp_compatibility,
)

__all__ = [
    "GPUMemoryMonitor",
    "check_optimizer_consistency",
    "check_pytree_leaf_dtypes",
    "compare_pytree_structures",
    "diagnose_pytree_structure",
    "log_memory_usage",
    "validate_fsdp_compatibility",
]
