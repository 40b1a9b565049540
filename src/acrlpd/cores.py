"""How many processor cores this process may use."""

import os


def usable_cores() -> int:
    """The cores that the system lets this process use: fewer than the machine has in a container or under `taskset`."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
