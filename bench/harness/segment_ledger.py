"""Books of a benchmark's segments: each transition that is stored says which segment it came in, and each is counted.

A sender writes a tag, its actor's id and the segment's number, where the version of the parameters would stand. The
store keeps a transition for a few seconds only, so the books must be brought up to date more often than it wraps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.replay_memory.store.layout import COMMIT, FIRST_KEY, Regions
from bench.harness.command import VerificationError

NUMBER_BITS = 20  # of a tag, 32 bits: the numbers begin anew after a million segments, the books balance all the same
MOST_ACTORS = 1 << (32 - NUMBER_BITS)


class Balance(NamedTuple):
    """Transitions that are amiss, each segment judged for itself."""

    lost: int
    twice: int  # stored beyond what was sent


def tag(actor_id: int, number: int) -> int:
    """What the transitions of an actor's segment are stored with, as their `version`."""
    return actor_id << NUMBER_BITS | number % (1 << NUMBER_BITS)


class SegmentLedger:
    """Counts what a store takes, by tag."""

    def __init__(self, regions: Regions) -> None:
        """Of a store that is mapped; nothing may have been inserted."""
        self._records, self._cells = regions.records, regions.cells
        self._seen: list[NDArray[np.int64]] = []  # int64[2, N]: tags, and how many transitions had each
        self.num_transitions = 0  # counted so far

    def look(self) -> None:
        """Counts what has come since the last look; raises VerificationError if some of it is gone already."""
        first, stop = self.num_transitions, int(self._cells[COMMIT])
        tags = self._records["version"][np.arange(first, stop) % len(self._records)]
        # Only now: what was overwritten while it was copied is below the watermark, which is moved first.
        oldest = int(self._cells[FIRST_KEY])
        if oldest > first:
            raise VerificationError(f"{oldest - first} transitions were overwritten before they could be counted")
        if stop > first:
            self._seen.append(np.stack(np.unique(tags.astype(np.int64), return_counts=True)))
        self.num_transitions = stop

    def balance(self, sent: Iterable[tuple[int, int]]) -> Balance:
        """Compares with (tag, number of transitions) of every segment that was sent and acknowledged."""
        rows = np.array([row for row in sent], np.int64).reshape(-1, 2).T
        tags, place = np.unique(np.concatenate([rows[0], *(seen[0] for seen in self._seen)]), return_inverse=True)
        signed = np.concatenate([-rows[1], *(seen[1] for seen in self._seen)])
        surplus = np.bincount(place, signed, len(tags)).astype(np.int64)
        return Balance(lost=-int(surplus[surplus < 0].sum()), twice=int(surplus[surplus > 0].sum()))
