"""Decides for each segment whether it is new, a duplicate or refused."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from apexreplay.types import Segment

BITMAP_BITS = 64


class InsertOutcome(StrEnum):
    """What the store did with a segment."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # already stored; its receipt was lost
    OLDER_INCARNATION = "older incarnation"  # a newer incarnation of the stream has sent segments
    UNKNOWN_ACTOR = "unknown actor"  # the run has no such actor id
    TOO_FAR_AHEAD = "too far ahead"  # beyond the bitmap: earlier segments must arrive first
    OUT_OF_ORDER = "out of order"  # an earlier segment must arrive first; the writer sends both again


class StreamRow(NamedTuple):
    """Which segments of one stream are stored; fields in the order of `layout.STREAM_ROW`."""

    commit: int  # commit number from which this row is valid
    incarnation: int
    contiguous: int  # every segment numbered below this is stored
    bitmap: int  # bit i: segment contiguous + 1 + i is stored too

    def judge(self, segment: Segment, commit: int, *, in_order: bool = False) -> tuple[InsertOutcome, StreamRow]:
        """Returns what to do with the segment, and the row after it: if stored, a new row valid from `commit` on.

        A higher incarnation resets the row. Segments below the segment's base were acknowledged earlier. `in_order`:
        a segment is stored only after its predecessor.
        """
        incarnation, contiguous = self.incarnation, self.contiguous
        stored = self.bitmap << 1  # Bit 0 stands for segment `contiguous`, which is not stored.
        if segment.stream.incarnation < incarnation:
            return InsertOutcome.OLDER_INCARNATION, self
        if segment.stream.incarnation > incarnation:
            incarnation, contiguous, stored = segment.stream.incarnation, 0, 0
        if segment.base > contiguous:
            contiguous, stored = segment.base, stored >> (segment.base - contiguous)
        ahead = segment.number - contiguous
        if ahead < 0 or stored >> ahead & 1:
            return InsertOutcome.DUPLICATE, self
        if ahead > BITMAP_BITS:
            return InsertOutcome.TOO_FAR_AHEAD, self
        if in_order and ahead and not stored >> ahead - 1 & 1:
            return InsertOutcome.OUT_OF_ORDER, self
        stored |= 1 << ahead
        while stored & 1:
            contiguous, stored = contiguous + 1, stored >> 1
        return InsertOutcome.STORED, StreamRow(commit, incarnation, contiguous, stored >> 1)
