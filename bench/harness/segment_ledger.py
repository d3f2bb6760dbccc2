"""Counts which segments a store has received: each stored transition carries the tag of its segment.

The tag consists of the actor id and the number of the segment, and is stored in the field for the version of the
parameters. The store keeps a transition for a few seconds only, so it must be read more often than it wraps.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.store.layout import COMMIT, FIRST_KEY, Regions
from bench.harness.command import VerificationError

# bits of a tag's 32 for the number of the segment, which wraps after a million segments; the counts stay correct
NUMBER_BITS = 20
MOST_ACTORS = 1 << (32 - NUMBER_BITS)


class Balance(NamedTuple):
    """Numbers of wrong transitions, counted segment by segment."""

    lost: int
    twice: int  # stored more often than sent


def tag(actor_id: int, number: int) -> int:
    """Returns the tag that is stored as the `version` of a segment's transitions."""
    return actor_id << NUMBER_BITS | number % (1 << NUMBER_BITS)


class SegmentLedger:
    """Counts the transitions that a store receives, by tag."""

    def __init__(self, regions: Regions) -> None:
        """`store`: a mapped store without any transition."""
        self._records, self._cells = regions.records, regions.cells
        self._seen: list[NDArray[np.int64]] = []  # int64[2, N]: tags, and the number of transitions of each
        self.num_transitions = 0  # number of transitions counted

    def look(self) -> None:
        """Counts the transitions since the last call; raises VerificationError if some were overwritten before."""
        first, stop = self.num_transitions, int(self._cells[COMMIT])
        tags = self._records["version"][np.arange(first, stop) % len(self._records)]
        # Read the watermark after the copy: it moves before anything is overwritten.
        oldest = int(self._cells[FIRST_KEY])
        if oldest > first:
            raise VerificationError(f"{oldest - first} transitions were overwritten before they could be counted")
        if stop > first:
            self._seen.append(np.stack(np.unique(tags.astype(np.int64), return_counts=True)))
        self.num_transitions = stop

    def balance(self, sent: Iterable[tuple[int, int]]) -> Balance:
        """Compares the counts with (tag, number of transitions) of every segment that was sent and acknowledged."""
        rows = np.array([row for row in sent], np.int64).reshape(-1, 2).T
        tags, place = np.unique(np.concatenate([rows[0], *(seen[0] for seen in self._seen)]), return_inverse=True)
        signed = np.concatenate([-rows[1], *(seen[1] for seen in self._seen)])
        surplus = np.bincount(place, signed, len(tags)).astype(np.int64)
        return Balance(lost=-int(surplus[surplus < 0].sum()), twice=int(surplus[surplus > 0].sum()))
