"""From priorities to the weights of the sum-tree, and which priorities are refused."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from apex.errors import require

MAX_STORED_PRIORITY = 1e6  # Larger ones, and infinity, count as this: one of them must not hide all others.


class PriorityWeights:
    """Leaf weights: priority ** exponent, of priorities between `min_priority` and MAX_STORED_PRIORITY."""

    def __init__(self, min_priority: float, exponent: float) -> None:
        """Raises ConfigError where the smallest weight would be 0."""
        # Below the smallest normal number a weight has few digits or none, and a fraction of the sum may be 0.
        require(
            min_priority > 0 and min_priority**exponent >= sys.float_info.min,
            f"replay.min_priority {min_priority} to the power of {exponent} vanishes: raise it",
        )
        self._min_priority = min_priority
        self._exponent = exponent

    def of(self, priorities: NDArray[np.float32]) -> NDArray[np.float64]:
        """The leaf weights, float64[B], never 0. A NaN counts as min_priority."""
        clamped = np.fmin(np.fmax(priorities.astype(np.float64), self._min_priority), MAX_STORED_PRIORITY)
        weights: NDArray[np.float64] = clamped**self._exponent
        return weights


def count_refused(priorities: NDArray[np.float32]) -> dict[str, int]:
    """How many priorities are refused, by reason."""
    if (priorities >= 0).all():
        return {}
    counts = {
        "priority is not a number": int(np.count_nonzero(np.isnan(priorities))),
        "priority is negative": int(np.count_nonzero(priorities < 0)),
    }
    return {reason: count for reason, count in counts.items() if count}
