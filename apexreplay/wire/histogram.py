"""A histogram of priorities. All replay servers use the same grid of bins, so their histograms can be added."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta

from apexreplay.facts import Record

BINS_PER_DECADE = 8
LOWEST_DECADE = -8  # Values below 10^-8 are counted in the first bin.
MAX_BINS = 256  # 32 decades

BinCount = Annotated[float, Meta(ge=0, le=2**53)]
Edge = Annotated[float, Meta(ge=1e-30, le=1e30)]  # Within these bounds, sums of squares are finite.


class Histogram(Record, frozen=True):
    """Counts of values per bin. The bins are equally wide on a logarithmic axis."""

    counts: Annotated[list[BinCount], Meta(min_length=1, max_length=MAX_BINS)]
    edges: Annotated[list[Edge], Meta(max_length=MAX_BINS + 1)]  # increasing; one more than `counts`

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong number or order of edges."""
        if len(self.edges) != len(self.counts) + 1 or any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("edges must increase, and there must be one more edge than counts")


def bin_edges(first: int, stop: int) -> list[float]:
    """Returns the edges of bins `first` ... `stop` - 1 of the grid."""
    edges: list[float] = (10.0 ** (LOWEST_DECADE + np.arange(first, stop + 1) / BINS_PER_DECADE)).tolist()
    return edges


def merge(histograms: Sequence[Histogram]) -> Histogram | None:
    """Returns the sum of several shards' histograms; None for an empty sequence."""
    if len(histograms) < 2:
        return histograms[0] if histograms else None
    total: dict[int, float] = {}
    for histogram in histograms:
        first = round((float(np.log10(histogram.edges[0])) - LOWEST_DECADE) * BINS_PER_DECADE)
        for index, count in enumerate(histogram.counts, first):
            total[index] = total.get(index, 0.0) + count
    first, stop = min(total), max(total) + 1
    return Histogram([total.get(index, 0.0) for index in range(first, stop)], bin_edges(first, stop))
