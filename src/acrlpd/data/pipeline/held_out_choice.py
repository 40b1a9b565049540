"""Which episodes of a dataset are held out for validation."""

import hashlib
from collections.abc import Mapping, Sequence

# With this many episodes, the loss of one to validation is small.
_ENOUGH_EPISODES = 10
# With this many successes and as many failures, validation has at least one of each, so that critics can be ranked.
_ENOUGH_OF_AN_OUTCOME = 5


def held_out_episodes(
    indices: Sequence[int], share: float, success: Mapping[int, bool] | None = None
) -> frozenset[int]:
    """The numbers of the episodes for validation.

    Each episode has its place in the order of choice by its number alone. So all seeds hold out the same episodes, and
    a dataset that has grown still holds out most of the episodes that it held out before. If there are enough episodes
    with and without `success`, the first of each kind is among the chosen ones.
    """
    count = round(share * len(indices))
    if share > 0 and len(indices) >= _ENOUGH_EPISODES:
        count = max(1, count)
    order = sorted(indices, key=lambda index: hashlib.blake2b(str(index).encode()).digest())
    outcomes = [[index for index in order if success[index] is ok] for ok in (True, False)] if success else [[]]
    if count == 0 or min(map(len, outcomes)) < _ENOUGH_OF_AN_OUTCOME:
        return frozenset(order[:count])
    firsts = [episodes[0] for episodes in outcomes]
    others = [index for index in order if index not in firsts]
    return frozenset([*firsts, *others[: max(0, count - len(firsts))]])
