"""Encodes and decodes messages. The table determines the shapes of the arrays; decoders refuse other shapes.

docs/protocol.md describes the layout. Decoders execute nothing from a message, and allocate no memory of a size that
a message states: they only compare that size with the expected one.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexreplay.frame_blob import BlobError, check_table, copy_runs, read_table
from apexreplay.item_kinds import MAX_STEPS, Array
from apexreplay.tables import Entry, Table
from apexreplay.types import RECEIPT_ROW, BatchMessage, PriorityUpdate, Receipts, Segment, Stream
from apexreplay.wire.header import Frame, Header, MessageKind, WireError, checksum, pack, require_field, unpack

_SEGMENT = struct.Struct("<QII")  # base, version, group
_BATCH = struct.Struct("<Q")  # number of transitions in the store

MAX_RECORDS = 4_096  # maximum items in a segment
MAX_PRIORITIES = 65_536  # maximum priorities in a message
MAX_RECEIPTS = 65_536  # maximum streams of a store, and so receipts in a message
MAX_INCARNATION = 2**63 - 1  # The store keeps incarnations and segment numbers as int64.
_LEAST_PROBABILITY = 2.0**-1000  # For a smaller probability P, 1 / P could overflow to infinity.


class Codec:
    """Encodes and decodes the messages of a table: segments, receipts, batches and priorities.

    Decoders raise WireError; the arrays that they return are views.
    """

    def __init__(self, run_id: int, table: Table) -> None:
        self.run_id = run_id
        self.table = table

    def encode_segment(self, segment: Segment, shard: int = 0) -> list[bytes]:
        """Returns one frame: header, base, version, group, records, blob. `shard` stores the segment."""
        start = _SEGMENT.pack(segment.base, segment.version, segment.group)
        body = b"".join([start, segment.records.tobytes(), segment.blob])
        return self._seal(MessageKind.SEGMENT, segment.stream, segment.number, len(segment.records), body, shard=shard)

    def decode_segment(self, frames: Sequence[Frame], shard: int = 0) -> Segment:
        """Decodes and checks what `encode_segment` wrote. Raises WireError if the segment is for another shard."""
        header, (body,) = self._check(frames, MessageKind.SEGMENT, 1)
        require_field(header.shard == shard, "shard", f"the segment is for shard {header.shard}, not for {shard}")
        count = header.num_items
        require_field(0 < count <= MAX_RECORDS, "count", f"{count} items, expected 1 to {MAX_RECORDS}")
        blob_at = _SEGMENT.size + header.num_items * self.table.record.itemsize
        require_field(len(body) >= blob_at + 8, "length", f"{len(body)} bytes cannot hold {header.num_items} records")
        base, version, group = _SEGMENT.unpack_from(body)
        require_field(base <= header.number, "base", f"base {base} is above segment number {header.number}")
        number, incarnation = header.number, header.incarnation
        require_field(number <= MAX_INCARNATION, "number", f"segment number {number} is not below 2^63")
        require_field(incarnation <= MAX_INCARNATION, "incarnation", f"incarnation {incarnation} is too large")
        records = np.frombuffer(body, self.table.record, header.num_items, _SEGMENT.size)
        blob = body[blob_at:]
        num_steps = self._check_blob(blob, MAX_STEPS)
        self._check_records(records, num_steps)
        priority = records["priority"]
        require_all(priority >= 0, "priority", "a priority is negative")
        # The message's checksum covers the header, base, version and group first, and then exactly what is stored.
        sealed = checksum(frames[0], [body[: _SEGMENT.size]]), header.crc
        stream = Stream(header.sender, header.incarnation)
        return Segment(stream, header.number, version, records, blob, base, sealed, group)

    def encode_receipts(self, receipts: Receipts, shard: int = 0) -> list[bytes]:
        """Returns one frame. Its first bytes are the topic of the group."""
        group, body = Stream(receipts.group, receipts.store_incarnation), receipts.rows.tobytes()
        header = pack(MessageKind.RECEIPT, shard, self.run_id, group, 0, 0, len(receipts.rows), [body])
        return [header + body]

    def decode_receipts(self, frames: Sequence[Frame]) -> Receipts:
        """Decodes what `encode_receipts` wrote."""
        header, (body,) = self._check(frames, MessageKind.RECEIPT, 1, schema=0)
        header.require_zero("number")
        count, size = header.num_items, RECEIPT_ROW.itemsize
        require_field(0 < count <= MAX_RECEIPTS, "count", f"{count} receipts, expected 1 to {MAX_RECEIPTS}")
        require_field(len(body) == size * count, "length", f"{len(body)} bytes, expected {size} for each of {count}")
        return Receipts(header.sender, header.incarnation, np.frombuffer(body, RECEIPT_ROW))

    def encode_batch(self, batch: BatchMessage) -> list[Any]:
        """Returns two frames: the header with the records, and the blob. The blob is not copied."""
        body = _BATCH.pack(batch.num_transitions) + batch.records.tobytes()
        stream, count, blob = Stream(batch.sampler, batch.store_incarnation), len(batch.records), memoryview(batch.blob)
        return self._seal(MessageKind.BATCH, stream, batch.number, count, body, blob, shard=batch.shard)

    def decode_batch(self, frames: Sequence[Frame], batch_size: int, shard: int = 0) -> BatchMessage:
        """Decodes what `encode_batch` wrote. The frames in the blob are checked later, when they are decompressed."""
        header, (body, blob) = self._check(frames, MessageKind.BATCH, 2)
        require_field(header.shard == shard, "shard", f"the batch is of shard {header.shard}, not of {shard}")
        require_field(header.num_items == batch_size, "count", f"{header.num_items} items, expected {batch_size}")
        expected = _BATCH.size + batch_size * self.table.batch_record.itemsize
        require_field(len(body) == expected, "length", f"{len(body)} bytes, expected {expected}")
        (num_transitions,) = _BATCH.unpack_from(body)
        require_field(0 < num_transitions < 2**40, "count", f"a store cannot have {num_transitions} items")
        records = np.frombuffer(body, self.table.batch_record, batch_size, _BATCH.size)
        per_item = records["num_frames"].astype(np.int64)
        limit = self.table.item.max_steps
        require_all(per_item <= limit, "count", f"an item has more than {limit} steps")
        num_steps = self._check_blob(blob, batch_size * limit)
        total = int(per_item.sum())
        require_field(total == num_steps, "count", f"{num_steps} steps in the blob, but {total} in the records")
        self._check_records(records, per_item)
        probability = records["probability"]
        likely = (probability >= _LEAST_PROBABILITY) & (probability <= 1)
        require_all(likely, "probability", f"a probability is outside [{_LEAST_PROBABILITY:g}, 1]")
        require_all(records["unused"] == 0, "unused", "an unused byte is not 0")
        return BatchMessage(
            header.shard, header.incarnation, header.sender, header.number, num_transitions, records, blob
        )

    def encode_request(self, batch_size: int, shard: int = 0) -> list[bytes]:
        """Returns one frame, a header: the request for one batch of `batch_size` items."""
        return self._seal(MessageKind.REQUEST, Stream(0, 0), 0, batch_size, b"", shard=shard)

    def decode_request(self, frames: Sequence[Frame], shard: int = 0) -> int:
        """Decodes what `encode_request` wrote."""
        header, (body,) = self._check(frames, MessageKind.REQUEST, 1)
        require_field(header.shard == shard, "shard", f"the request is for shard {header.shard}, not for {shard}")
        header.require_zero("sender", "incarnation", "number")
        count = header.num_items
        require_field(0 < count <= MAX_PRIORITIES, "count", f"{count} items, expected 1 to {MAX_PRIORITIES}")
        require_field(len(body) == 0, "length", f"{len(body)} bytes, expected 0")
        return count

    def encode_priorities(self, update: PriorityUpdate) -> list[bytes]:
        """Returns one frame: header, keys, priorities."""
        body = update.keys.astype("<i8").tobytes() + update.priorities.astype("<f4").tobytes()
        stream, count = Stream(update.sampler, update.store_incarnation), len(update.keys)
        return self._seal(MessageKind.PRIORITIES, stream, update.number, count, body, shard=update.shard)

    def decode_priorities(self, frames: Sequence[Frame], shard: int = 0) -> PriorityUpdate:
        """Decodes what `encode_priorities` wrote. The store checks the values of the priorities."""
        header, (body,) = self._check(frames, MessageKind.PRIORITIES, 1)
        require_field(header.shard == shard, "shard", f"the priorities are for shard {header.shard}, not {shard}")
        count = header.num_items
        require_field(count <= MAX_PRIORITIES, "count", f"{count} priorities, expected at most {MAX_PRIORITIES}")
        require_field(len(body) == 12 * count, "length", f"{len(body)} bytes, expected 12 for each of {count} keys")
        keys = np.frombuffer(body, "<i8", count)
        priorities = np.frombuffer(body, "<f4", count, 8 * count)
        return PriorityUpdate(header.shard, header.incarnation, header.sender, header.number, keys, priorities)

    def _seal(
        self, kind: MessageKind, stream: Stream, number: int, count: int, body: bytes, *more: Frame, shard: int = 0
    ) -> list[Any]:
        """Returns the frames of a message: header and body, then `more`."""
        header = pack(kind, shard, self.run_id, stream, self.table.fingerprint, number, count, [body, *more])
        return [header + body, *more]

    def _check(
        self, frames: Sequence[Frame], kind: MessageKind, num_frames: int, *, schema: int | None = None
    ) -> tuple[Header, list[memoryview]]:
        header, bodies = unpack(frames, kind, num_frames)
        require_field(header.run_id == self.run_id, "run", f"run id {header.run_id:x}, expected {self.run_id:x}")
        expected = self.table.fingerprint if schema is None else schema
        require_field(header.schema == expected, "schema", f"schema {header.schema:x}, expected {expected:x}")
        return header, bodies

    def _check_blob(self, blob: memoryview, limit: int) -> int:
        """Checks a blob and returns its number of steps. Raises WireError for more than `limit` steps."""
        entries = self.table.entries
        shortest = min(1 if entry.codec == "lz4" else entry.num_bytes for entry in entries)
        try:
            count = check_table(
                blob, shortest=shortest, longest=self.table.max_entry_bytes, max_frames=limit * len(entries)
            )
        except BlobError as error:
            raise WireError("blob", str(error)) from error
        num_steps, rest = divmod(count, len(entries))
        require_field(rest == 0, "blob", f"{count} entries, expected a multiple of {len(entries)}")
        offsets = read_table(blob, count)
        for index, entry in enumerate(entries):
            starts, stops = offsets[:-1][index :: len(entries)], offsets[1:][index :: len(entries)]
            if len(entries) > 1:  # Otherwise the limits above are exact.
                right = stops - starts == entry.num_bytes if entry.codec == "raw" else stops - starts <= entry.max_bytes
                require_all(right, "blob", f"a step has a wrong number of bytes of {', '.join(entry.names)}")
            if entry.codec == "raw":
                self._check_rows(entry, blob, starts)
        return num_steps

    def _check_rows(self, entry: Entry, blob: memoryview, starts: NDArray[np.int64]) -> None:
        """Raises WireError if a float of uncompressed entries, which begin at the bytes `starts`, is not finite."""
        fields = entry.dtype.fields
        if (entry.dtype.kind if fields is None else "f") != "f":
            return
        if len(self.table.entries) == 1:  # One after the other.
            rows = np.frombuffer(blob, entry.dtype, offset=int(starts[0]))
        else:
            rows = copy_runs(np.frombuffer(blob, np.uint8), starts, entry.num_bytes).reshape(-1).view(entry.dtype)
        columns = [rows] if fields is None else [rows[name] for name in fields]
        for column in columns:
            if column.dtype.kind == "f":
                require_all(np.isfinite(column), "blob", f"a value of {', '.join(entry.names)} is not finite")

    def num_steps(self, records: Array) -> int:
        """Returns how many steps the items of a segment stand for: one each, unless a codec knows better."""
        return len(records)

    def _check_records(self, records: Array, num_steps: Array | int) -> None:
        """Checks the fields that segments and batches share. `num_steps`: steps of the message, or of each record."""
        for name in self.table.floats:
            if name in (records.dtype.names or ()):
                require_all(np.isfinite(records[name]), name, f"`{name}` is not finite")
        flaw = self.table.item.flaw(records, num_steps)
        require_field(not flaw, "steps", flaw)


def require_all(valid: Array, reason: str, text: str) -> None:
    """Raises WireError unless all elements of `valid` are True."""
    require_field(bool(valid.all()), reason, text)
