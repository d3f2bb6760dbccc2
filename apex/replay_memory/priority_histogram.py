"""What replay keeps, by priority: how many transitions lie in each of some bins that grow by the same factor."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from apex.replay_memory.store.layout import Store
from apex.transport.messages.histogram import BINS_PER_DECADE, LOWEST_DECADE, Histogram, bin_edges

PERIOD = 10.0  # seconds between two of them
MOST_KEYS = 10_000  # looked at; more would tell no more, and hold up the writer's thread


class PriorityHistogram:
    """Made anew every PERIOD seconds at most, of keys that are spread over all that live."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._rng = np.random.default_rng(0)  # Which keys are looked at is no matter of chance.
        self._made_at = -np.inf
        self._newest: Histogram | None = None

    def newest(self) -> Histogram | None:
        """The newest histogram; None while there is none to make.

        Counts are transitions, scaled up from the keys that were looked at. Edges are |TD error|, without the exponent;
        an exponent of 0 tells none. Takes about a millisecond each PERIOD.
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
        # One key of each of `count` equal ranges: what was inserted at one time has priorities of its own.
        keys = first_key + ((np.arange(count) + self._rng.random(count)) * (size / max(1, count))).astype(np.int64)
        weights = store.weights(keys)
        weights = weights[weights > 0]  # The others are just being overwritten.
        if not len(weights):
            return None
        decades = np.log10(weights) / store.priority_exponent
        counts = np.bincount(((decades - LOWEST_DECADE).clip(0) * BINS_PER_DECADE).astype(np.int64))
        start = int(np.flatnonzero(counts)[0])
        return Histogram((counts[start:] * (size / len(weights))).tolist(), bin_edges(start, len(counts)))
