"""openpi's FSDP rule: which arrays are split over devices, and along which axis."""

import math
from collections.abc import Sequence


def split_axis(shape: Sequence[int], itemsize: int, num_devices: int, min_size_mib: float) -> int | None:
    """The axis on which an array is split over `num_devices`; None: every device holds the whole array.

    Arrays of two or more axes and at least `min_size_mib` are split on their largest axis that the number of devices
    divides, the last of equal ones.
    """
    if num_devices == 1 or len(shape) < 2 or math.prod(shape) * itemsize < min_size_mib * 2**20:
        return None
    axes = [axis for axis, length in enumerate(shape) if length and length % num_devices == 0]
    return max(axes, key=lambda axis: (shape[axis], axis), default=None)
