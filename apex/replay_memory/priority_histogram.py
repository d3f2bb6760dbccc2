"""What replay keeps, by priority: how many transitions lie in each of some bins that grow by the same factor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from apex.replay_memory.store.layout import Store

PERIOD = 10.0  # seconds between two of them
MOST_KEYS = 10_000  # looked at; more would tell no more, and hold up the writer's thread
BINS_PER_DECADE = 8
MOST_BINS = 1_000  # of one that is believed: float64 spans 617 decades, of which these are 125
LOWEST_DECADE = -8  # What lies below the first bin counts as in it.


class PriorityHistogram:
    """Made anew every PERIOD seconds at most, of keys that are spread over all that live."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._rng = np.random.default_rng(0)  # Which keys are looked at is no matter of chance.
        self._made_at = -np.inf
        self._newest: dict[str, Any] | None = None

    def newest(self) -> dict[str, Any] | None:
        """{"counts": [K], "edges": [K + 1]} as `MetricsWriter` takes it; None while there is none to make.

        Counts are transitions, scaled up from the keys that were looked at. Edges are |TD error|, without the exponent;
        an exponent of 0 tells none. Takes about a millisecond each PERIOD.
        """
        now = self._clock()
        if now - self._made_at >= PERIOD and self._store.priority_exponent > 0:
            made = self._make()
            if made is not None:
                self._made_at, self._newest = now, made
        return self._newest

    def _make(self) -> dict[str, Any] | None:
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
        edges = 10.0 ** (LOWEST_DECADE + np.arange(start, len(counts) + 1) / BINS_PER_DECADE)
        return {"counts": (counts[start:] * (size / len(weights))).tolist(), "edges": edges.tolist()}


def merge(histograms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of several shards' histograms, at least one; raises ValueError for what `PriorityHistogram` did not make."""
    total: dict[int, float] = {}
    for histogram in histograms:
        try:
            counts, first = histogram["counts"], float(histogram["edges"][0])
            start = round((np.log10(first) - LOWEST_DECADE) * BINS_PER_DECADE) if first > 0 else -1
            if not 0 <= start < MOST_BINS or not 0 < len(counts) <= MOST_BINS:
                raise ValueError(f"a histogram of {len(counts)} bins from {first} on")
            for index, count in enumerate(counts):
                total[start + index] = total.get(start + index, 0.0) + float(count)
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"a histogram that is none: {error!r}") from error
    start, stop = min(total), max(total) + 1
    edges = 10.0 ** (LOWEST_DECADE + np.arange(start, stop + 1) / BINS_PER_DECADE)
    return {"counts": [total.get(index, 0.0) for index in range(start, stop)], "edges": edges.tolist()}
