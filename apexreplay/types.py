"""Records of the messages between writers, replay server and samplers."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from apexreplay.frame_blob import FrameBlob
from apexreplay.item_kinds import Array


class Stream(NamedTuple):
    """One incarnation of one environment stream."""

    actor_id: Annotated[int, Meta(ge=0, le=2**32 - 1)]  # 0 ... N-1; the highest id has the smallest epsilon
    incarnation: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # increases with every lease of the id

    def shard(self, num_shards: int) -> int:
        """Returns the replay shard that stores the stream, the same for all incarnations."""
        return self.actor_id % num_shards


def group_of(streams: Sequence[Stream]) -> int:
    """Returns the group of a sender with these streams, under which it gets their receipts: the lowest actor id."""
    return min(stream.actor_id for stream in streams)


class Cut(NamedTuple):
    """The content of one stream's next `Segment`."""

    stream_index: int  # 0 ... E-1
    records: Array  # record_dtype[M], M >= 1, in order of time
    blob: bytes


class Segment(NamedTuple):
    """About 50 consecutive transitions of one stream. A frame that several transitions share is contained once."""

    stream: Stream
    number: int  # 0, 1, 2, ... within the stream's incarnation
    version: int  # version (num_updates) of the newest parameters that chose an action in this segment
    records: Array  # Table.record[M]
    blob: FrameBlob  # uint32[F + 1] byte offsets of the frames, then the frames; see `make_blob`
    base: int = 0  # all segments with lower numbers were acknowledged, by this store or an earlier one
    # From the message, (initial, final): final = crc32(blob, crc32(records, initial)).
    checksum: tuple[int, int] | None = None
    group: int = 0  # where its receipt goes: the lowest actor id of the sender's streams


class Receipt(NamedTuple):
    """Tells an actor which segments of one stream the replay server has stored."""

    stream: Stream
    store_incarnation: int  # if this changes, the store is new, and unacknowledged segments are sent again
    contiguous: int  # all segments with lower numbers are stored
    bitmap: int  # bit i: segment contiguous + 1 + i is stored too


RECEIPT_ROW = np.dtype([("actor_id", "<u4"), ("incarnation", "<u8"), ("contiguous", "<u8"), ("bitmap", "<u8")])


class Receipts(NamedTuple):
    """The receipts for streams of one sender, which are sent together."""

    group: int  # that of the segments
    store_incarnation: int
    rows: Array  # RECEIPT_ROW[streams]

    def each(self) -> list[Receipt]:
        """Returns the receipt of each stream."""
        return [Receipt(Stream(i, life), self.store_incarnation, *stored) for i, life, *stored in self.rows.tolist()]


class BatchMessage(NamedTuple):
    """A shard's part of a batch: records and their compressed frames."""

    shard: int
    store_incarnation: int  # keys are valid only within this incarnation
    sampler: int  # number of the sampler process that drew the part
    number: int  # sequence number within that sampler; returned with the priorities to limit parts in flight
    num_transitions: int  # transitions in the shard when the part was drawn: N in the importance weights
    records: Array  # Table.batch_record[B]
    blob: FrameBlob  # all frames, as in `make_blob`; empty if they are already decoded into the learner's memory


class PriorityUpdate(NamedTuple):
    """New priorities for the transitions of one part of a batch, by key. Without keys it only returns credit."""

    shard: int
    store_incarnation: int
    sampler: int
    number: int
    keys: NDArray[np.int64]  # [B] or [0]
    priorities: NDArray[np.float32]  # [B] or [0]  |TD error|, before the exponent
