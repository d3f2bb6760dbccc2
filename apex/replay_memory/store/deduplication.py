"""Which segments are stored: those that are sound, and of these the ones that the store does not have yet."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from apex.frame_blob import BlobError, check_table
from apex.replay_memory.store.layout import Sizes
from apex.types import RECORD, Schema, Segment

BITMAP_BITS = 64
_NUMBERS = 2**63  # Segment numbers and incarnations are below.


class InsertOutcome(StrEnum):
    """What became of a segment."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # already stored: its receipt was lost
    OLDER_INCARNATION = "older incarnation"  # its stream has a newer life
    UNKNOWN_ACTOR = "unknown actor"  # no such actor id in this run
    TOO_FAR_AHEAD = "too far ahead"  # beyond the bitmap: what comes before must arrive first


class StreamRow(NamedTuple):
    """What the store has of one stream, in the order of `layout.STREAM_ROW`.

    It tells which segment comes twice, out of order or from an older life of the stream.
    """

    commit: int  # the commit number with which it begins to hold
    incarnation: int
    contiguous: int  # every segment numbered below this is stored
    bitmap: int  # bit i: segment contiguous + 1 + i is stored too

    def judge(self, segment: Segment, commit: int) -> tuple[InsertOutcome, StreamRow]:
        """Says what is to be done with the segment, and the row after that; `commit` is then its commit number.

        A higher incarnation begins a row anew. What lies below the segment's base was acknowledged earlier, if not
        by this store then by one before it, and will not come again.
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


def check_segment(segment: Segment, blob: memoryview, schema: Schema, sizes: Sizes) -> None:
    """Raises ValueError for what would harm the store or its readers; the wire has checked the rest."""
    records, num_bytes = segment.records, len(blob)
    _require(records.dtype == RECORD, f"records are {records.dtype}")
    _require(0 < len(records) <= sizes.capacity, f"{len(records)} records, capacity is {sizes.capacity}")
    _require(num_bytes <= sizes.arena_bytes, f"a blob of {num_bytes} bytes, {sizes.arena_bytes} are kept")
    _require(0 <= segment.base <= segment.number < _NUMBERS, f"number {segment.number}, base {segment.base}")
    _require(0 <= segment.stream.incarnation < _NUMBERS, f"incarnation {segment.stream.incarnation}")
    _require(0 <= segment.version < 2**32, f"version {segment.version}")
    try:
        num_frames = check_table(blob, shortest=0, longest=schema.max_frame_bytes)
    except BlobError as error:
        raise ValueError(f"segment: {error}") from error
    frame, next_frame = records["frame"].astype(np.int64), records["next_frame"].astype(np.int64)
    _require((frame <= next_frame).all() and next_frame.max() < num_frames, "a frame is not in the blob")
    for newest, depth in ((frame, records["depth"]), (next_frame, records["next_depth"])):
        _require(depth.min() >= 1 and (depth <= newest + 1).all(), "a stack begins before the blob")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(f"segment: {message}")
