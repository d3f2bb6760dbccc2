"""Histogram of the priorities in the replay memory, with logarithmic bins."""

import time
from collections.abc import Callable

import numpy as np

from apexreplay.store.layout import Store
from apexreplay.wire.histogram import BINS_PER_DECADE, LOWEST_DECADE, Histogram, bin_edges

PERIOD = 10.0  # minimum seconds between two histograms
MOST_KEYS = 10_000  # maximum number of transitions examined; examining more would delay the writer's thread


class PriorityHistogram:
    """Computes a histogram at most every PERIOD seconds, from live keys spread evenly over the memory."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._rng = np.random.default_rng(0)  # Fixed seed: the keys only need to be spread evenly.
        self._made_at = -np.inf
        self._newest: Histogram | None = None

    def newest(self) -> Histogram | None:
        """Returns the newest histogram; None if the store is empty or the priority exponent is 0.

        Each count estimates the number of transitions in the bin from the examined keys. Bin edges are |TD error|,
        without the exponent. Computing a histogram takes about 1 ms.
        """
        now = self._clock()
        if now - self._made_at >= PERIOD and self._store.priority_exponent > 0:
            made = self._make()
            if made is not None:
                self._made_at, self._newest = now, made
        return self._newest

    def _make(self) -> Histogram | None:
        store = self._store
        first_key, size = store.first_key, store.size
        count = min(size, MOST_KEYS)
        # One key from each of `count` equal ranges, because priorities differ between old and new transitions.
        keys = first_key + ((np.arange(count) + self._rng.random(count)) * (size / max(1, count))).astype(np.int64)
        weights = store.weights(keys)
        weights = weights[weights > 0]  # Weight 0: the transition is being overwritten.
        if not len(weights):
            return None
        decades = np.log10(weights) / store.priority_exponent
        counts = np.bincount(((decades - LOWEST_DECADE).clip(0) * BINS_PER_DECADE).astype(np.int64))
        start = int(np.flatnonzero(counts)[0])
        return Histogram((counts[start:] * (size / len(weights))).tolist(), bin_edges(start, len(counts)))
