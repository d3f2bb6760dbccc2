"""Converts priorities to the weights of the sum-tree, and counts invalid priorities."""

import sys

import numpy as np
from numpy.typing import NDArray

from apexreplay.errors import require

MAX_STORED_PRIORITY = 1e6  # Larger priorities are clipped to this, so that none dominates all others.


class PriorityWeights:
    """Computes leaf weights: priority ** exponent, with priorities clipped to [min_priority, MAX_STORED_PRIORITY]."""

    def __init__(self, min_priority: float, exponent: float) -> None:
        """Raises UsageError if the smallest weight would be 0 or denormal."""
        # Denormal weights have few digits, and their share of the sum may round to 0.
        is_normal = min_priority > 0 and min_priority**exponent >= sys.float_info.min
        problem = f"min_priority {min_priority} ** priority_exponent {exponent} is too close to 0"
        require(is_normal, problem, remedy="raise min_priority")
        self._min_priority = min_priority
        self._exponent = exponent

    def of(self, priorities: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the leaf weights, float64[B], all > 0. NaN counts as min_priority."""
        clamped = np.fmin(np.fmax(priorities.astype(np.float64), self._min_priority), MAX_STORED_PRIORITY)
        weights: NDArray[np.float64] = clamped**self._exponent
        return weights


def count_refused(priorities: NDArray[np.float32]) -> dict[str, int]:
    """Returns {reason: number of refused priorities}."""
    if (priorities >= 0).all():
        return {}
    counts = {
        "priority is not a number": int(np.count_nonzero(np.isnan(priorities))),
        "priority is negative": int(np.count_nonzero(priorities < 0)),
    }
    return {reason: count for reason, count in counts.items() if count}
