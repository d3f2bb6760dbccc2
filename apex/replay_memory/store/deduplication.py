"""Which segments the store does not have yet."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from apex.types import Segment

BITMAP_BITS = 64


class InsertOutcome(StrEnum):
    """What became of a segment."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # already stored: its receipt was lost
    OLDER_INCARNATION = "older incarnation"  # its stream has a newer life
    UNKNOWN_ACTOR = "unknown actor"  # no such actor id in this run
    TOO_FAR_AHEAD = "too far ahead"  # beyond the bitmap: what comes before must arrive first


class StreamRow(NamedTuple):
    """What the store has of one stream, in the order of `layout.STREAM_ROW`."""

    commit: int  # the commit number with which it begins to hold
    incarnation: int
    contiguous: int  # every segment numbered below this is stored
    bitmap: int  # bit i: segment contiguous + 1 + i is stored too

    def judge(self, segment: Segment, commit: int) -> tuple[InsertOutcome, StreamRow]:
        """Says what is to be done with the segment, and the row after that; `commit` is then its commit number.

        A higher incarnation begins a row anew. What lies below the segment's base was acknowledged earlier.
        """
        incarnation, contiguous = self.incarnation, self.contiguous
        stored = self.bitmap << 1  # Bit 0 is `contiguous` itself, not stored yet.
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
        stored |= 1 << ahead
        while stored & 1:
            contiguous, stored = contiguous + 1, stored >> 1
        return InsertOutcome.STORED, StreamRow(commit, incarnation, contiguous, stored >> 1)
