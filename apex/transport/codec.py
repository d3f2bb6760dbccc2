"""What travels, message by message: arrays whose shapes the schema gives, everything else refused.

The layout is described in docs/protocol.md. Nothing is executed, and nothing is allocated by a number that came from
the wire: lengths are only compared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from apex.frame_blob import BlobError, check_table, table_bytes
from apex.transport.header import Frame, Header, MessageKind, WireError, pack, require_field, unpack
from apex.transport.json_codec import convert, encode_json, parse_json
from apex.transport.messages.results import ActorFigures, EvaluationResult
from apex.types import (
    BATCH_RECORD,
    RECORD,
    Array,
    BatchMessage,
    Parameters,
    PriorityUpdate,
    Receipt,
    Schema,
    Segment,
    Stream,
)

_SEGMENT = struct.Struct("<QI")  # base, version
_RECEIPT = struct.Struct("<QQ")  # store incarnation, bitmap
_BATCH = struct.Struct("<Q")  # transitions alive

MAX_RECORDS = 4_096  # in one segment
MAX_FRAMES = 8_192  # in one segment
MAX_VERSION = 2**32 - 1
_NUMBERS = 2**63  # Segment numbers and incarnations are below: the store keeps them as i8.
_LEAST_PROBABILITY = 2.0**-1000  # One over a smaller one may be infinite, divided by the number of shards.


class Codec:
    """Encodes and decodes the messages of one run. Decoders raise WireError; what they return views what they got."""

    def __init__(self, run_id: int, schema: Schema) -> None:
        self.run_id = run_id
        self.schema = schema
        self._fingerprint = schema.fingerprint

    def encode_segment(self, segment: Segment, shard: int = 0) -> list[bytes]:
        """One frame: header, base and version, records, blob. `shard` is where it belongs."""
        body = b"".join(
            [_SEGMENT.pack(segment.base, segment.version), segment.records.tobytes(), memoryview(segment.blob)]
        )
        return self._seal(MessageKind.SEGMENT, segment.stream, segment.number, len(segment.records), body, shard=shard)

    def decode_segment(self, frames: Sequence[Frame], shard: int = 0) -> Segment:
        """The inverse of `encode_segment`, checked field by field against the schema; another shard's is refused."""
        header, (body,) = self._check(frames, MessageKind.SEGMENT, 1)
        require_field(header.shard == shard, "shard", f"a segment for shard {header.shard}, but this is {shard}")
        require_field(0 < header.num_items <= MAX_RECORDS, "count", f"{header.num_items} records in a segment")
        blob_at = _SEGMENT.size + header.num_items * RECORD.itemsize
        require_field(len(body) >= blob_at + 8, "length", f"{len(body)} bytes for {header.num_items} records")
        base, version = _SEGMENT.unpack_from(body)
        require_field(base <= header.number, "base", f"base {base} above number {header.number}")
        require_field(header.number < _NUMBERS, "number", f"segment {header.number}")
        require_field(header.incarnation < _NUMBERS, "incarnation", f"incarnation {header.incarnation}")
        records = np.frombuffer(body, RECORD, header.num_items, _SEGMENT.size)
        blob = body[blob_at:]
        num_frames = self._check_blob(blob, MAX_FRAMES)
        self._check_records(records, num_frames)
        require_field(bool(np.isfinite(records["priority"]).all()), "priority", "a priority is not finite")
        require_field(bool((records["priority"] >= 0).all()), "priority", "a priority is negative")
        return Segment(Stream(header.sender, header.incarnation), header.number, version, records, blob, base)

    def encode_receipt(self, receipt: Receipt, shard: int = 0) -> list[bytes]:
        """One frame; its first bytes are the stream's topic."""
        body = _RECEIPT.pack(receipt.store_incarnation, receipt.bitmap)
        return self._seal(MessageKind.RECEIPT, receipt.stream, receipt.contiguous, 0, body, shard=shard, schema=0)

    def decode_receipt(self, frames: Sequence[Frame]) -> Receipt:
        """The inverse of `encode_receipt`."""
        header, (body,) = self._check(frames, MessageKind.RECEIPT, 1, schema=0)
        require_field(len(body) == _RECEIPT.size, "length", f"{len(body)} bytes in a receipt")
        header.require_zero("num_items")
        store_incarnation, bitmap = _RECEIPT.unpack(body)
        return Receipt(Stream(header.sender, header.incarnation), store_incarnation, header.number, bitmap)

    def encode_batch(self, batch: BatchMessage) -> list[Any]:
        """Two frames: header and records; the blob, which is not copied."""
        body = _BATCH.pack(batch.num_transitions) + batch.records.tobytes()
        if batch.blob is None:
            raise ValueError("a batch whose frames are decoded already does not travel")
        blob = memoryview(batch.blob)
        stream, count = Stream(batch.sampler, batch.store_incarnation), len(batch.records)
        bodies: list[Frame] = [body, blob]
        head = pack(MessageKind.BATCH, batch.shard, self.run_id, stream, self._fingerprint, batch.number, count, bodies)
        return [head + body, blob]

    def decode_batch(self, frames: Sequence[Frame], batch_size: int, num_shards: int = 1) -> BatchMessage:
        """The inverse of `encode_batch`; the blob's frames themselves are checked when they are decompressed."""
        header, (body, blob) = self._check(frames, MessageKind.BATCH, 2)
        require_field(header.shard < num_shards, "shard", f"shard {header.shard}, but there are {num_shards}")
        require_field(
            header.num_items == batch_size, "count", f"{header.num_items} transitions, but batches hold {batch_size}"
        )
        expected = _BATCH.size + batch_size * BATCH_RECORD.itemsize
        require_field(len(body) == expected, "length", f"{len(body)} bytes, but {batch_size} records take {expected}")
        (num_transitions,) = _BATCH.unpack_from(body)
        require_field(0 < num_transitions < 2**40, "count", f"{num_transitions} transitions alive")
        records = np.frombuffer(body, BATCH_RECORD, batch_size, _BATCH.size)
        per_transition = records["num_frames"].astype(np.int64)
        limit = 2 * self.schema.stack + self.schema.n_step
        require_field(bool((per_transition <= limit).all()), "count", f"more than {limit} frames in a transition")
        num_frames = self._check_blob(blob, batch_size * limit)
        require_field(
            int(per_transition.sum()) == num_frames, "count", f"{num_frames} frames, the records say otherwise"
        )
        self._check_records(records, per_transition)
        probability = records["probability"]
        likely = (probability >= _LEAST_PROBABILITY) & (probability <= 1)
        require_field(bool(likely.all()), "probability", f"outside [{_LEAST_PROBABILITY:g}, 1]")
        require_field(not records["unused"].any(), "unused", "is not 0")
        return BatchMessage(
            header.shard, header.incarnation, header.sender, header.number, num_transitions, records, blob
        )

    def encode_priorities(self, update: PriorityUpdate) -> list[bytes]:
        """One frame: header, keys, priorities."""
        body = update.keys.astype("<i8").tobytes() + update.priorities.astype("<f4").tobytes()
        stream, count = Stream(update.sampler, update.store_incarnation), len(update.keys)
        return self._seal(MessageKind.PRIORITIES, stream, update.number, count, body, shard=update.shard)

    def decode_priorities(self, frames: Sequence[Frame], shard: int = 0) -> PriorityUpdate:
        """The inverse of `encode_priorities`. What a priority may be is the store's business."""
        header, (body,) = self._check(frames, MessageKind.PRIORITIES, 1)
        require_field(header.shard == shard, "shard", f"priorities for shard {header.shard}, but this is {shard}")
        require_field(0 < header.num_items <= 65_536, "count", f"{header.num_items} priorities")
        require_field(
            len(body) == 12 * header.num_items, "length", f"{len(body)} bytes for {header.num_items} priorities"
        )
        keys = np.frombuffer(body, "<i8", header.num_items)
        priorities = np.frombuffer(body, "<f4", header.num_items, 8 * header.num_items)
        return PriorityUpdate(header.shard, header.incarnation, header.sender, header.number, keys, priorities)

    def encode_parameters(self, parameters: Parameters) -> list[bytes]:
        """One frame, because CONFLATE keeps the last frame of a message only."""
        body = parameters.values.astype("<f4", copy=False).tobytes()
        return self._seal(MessageKind.PARAMETERS, Stream(0, 0), parameters.version, len(parameters.values), body)

    def decode_parameters(self, frames: Sequence[Frame], num_parameters: int) -> Parameters:
        """The inverse of `encode_parameters`; there must be exactly `num_parameters` finite values."""
        header, (body,) = self._check(frames, MessageKind.PARAMETERS, 1)
        header.require_zero("shard", "sender", "incarnation")
        version, count = _version(header.number), header.num_items
        require_field(count == num_parameters, "count", f"{count} values, not {num_parameters}")
        require_field(len(body) == 4 * count, "length", f"{len(body)} bytes for {count} values")
        return Parameters(version, _finite(body))

    def encode_evaluation(self, result: EvaluationResult, parameters: Parameters | None) -> list[bytes]:
        """One frame: header, the values of the parameters that were evaluated (or none), the result as JSON."""
        values = b"" if parameters is None else parameters.values.astype("<f4", copy=False).tobytes()
        version = 0 if parameters is None else parameters.version
        body = values + encode_json(result)
        return self._seal(MessageKind.EVALUATION, Stream(0, 0), version, len(values) // 4, body)

    def decode_evaluation(
        self, frames: Sequence[Frame], num_parameters: int
    ) -> tuple[EvaluationResult, Parameters | None]:
        """The inverse of `encode_evaluation`."""
        header, (body,) = self._check(frames, MessageKind.EVALUATION, 1)
        header.require_zero("shard", "sender", "incarnation")
        count, cut = header.num_items, 4 * header.num_items
        require_field(count in (0, num_parameters), "count", f"{count} values, not {num_parameters}")
        require_field(len(body) >= cut, "length", f"{len(body)} bytes for {count} values")
        version = _version(header.number)
        result: EvaluationResult = convert(parse_json(body[cut:]), EvaluationResult)
        return result, Parameters(version, _finite(body[:cut])) if count else None

    def encode_metrics(self, figures: ActorFigures) -> list[bytes]:
        """One frame: header, JSON."""
        body = encode_json(figures)
        return self._seal(MessageKind.METRICS, Stream(0, 0), 0, 0, body, schema=0)

    def decode_metrics(self, frames: Sequence[Frame]) -> ActorFigures:
        """The inverse of `encode_metrics`."""
        header, (body,) = self._check(frames, MessageKind.METRICS, 1, schema=0)
        header.require_zero("shard", "sender", "incarnation", "number", "num_items")
        figures: ActorFigures = convert(parse_json(body), ActorFigures)
        return figures

    def _seal(
        self,
        kind: MessageKind,
        stream: Stream,
        number: int,
        count: int,
        body: bytes,
        *,
        shard: int = 0,
        schema: int = -1,
    ) -> list[bytes]:
        """One frame: header, body. `schema`: -1 for the run's."""
        schema = self._fingerprint if schema < 0 else schema
        return [pack(kind, shard, self.run_id, stream, schema, number, count, [body]) + body]

    def _check(
        self, frames: Sequence[Frame], kind: MessageKind, num_frames: int, *, schema: int | None = None
    ) -> tuple[Header, list[memoryview]]:
        header, bodies = unpack(frames, kind, num_frames)
        require_field(header.run_id == self.run_id, "run", f"run {header.run_id:x}, but this is {self.run_id:x}")
        expected = self._fingerprint if schema is None else schema
        require_field(header.schema == expected, "schema", f"schema {header.schema:x}, but this is {expected:x}")
        return header, bodies

    def _check_blob(self, blob: memoryview, limit: int) -> int:
        """Returns the number of frames of a sound blob, `limit` at most."""
        schema = self.schema
        shortest = schema.frame_bytes if schema.codec == "raw" else 1
        try:
            num_frames = check_table(blob, shortest=shortest, longest=schema.max_frame_bytes, max_frames=limit)
        except BlobError as error:
            raise WireError("blob", str(error)) from error
        if schema.frame_dtype == "float32":
            values = np.frombuffer(blob, "<f4", offset=table_bytes(num_frames))
            require_field(bool(np.isfinite(values).all()), "blob", "a value is not finite")
        return num_frames

    def _check_records(self, records: Array, num_frames: Array | int) -> None:
        """Checks what segments and batches have in common; `num_frames` bounds the frame numbers."""
        schema = self.schema
        frame, next_frame = records["frame"].astype(np.int64), records["next_frame"].astype(np.int64)
        depth, next_depth = records["depth"], records["next_depth"]
        discount = records["discount"]
        require_field(bool(np.isfinite(records["n_step_return"]).all()), "return", "an n-step return is not finite")
        require_field(bool(((discount >= 0) & (discount <= 1)).all()), "discount", "outside [0, 1]")
        require_field(bool((records["action"] < schema.num_actions).all()), "action", f"not below {schema.num_actions}")
        require_field(bool(((depth >= 1) & (depth <= schema.stack)).all()), "depth", f"outside 1 ... {schema.stack}")
        require_field(bool(((next_depth >= 1) & (next_depth <= schema.stack)).all()), "depth", "of a next observation")
        steps = next_frame - frame
        require_field(
            bool(((steps >= 1) & (steps <= schema.n_step)).all()), "frames", f"not 1 ... {schema.n_step} apart"
        )
        require_field(bool((next_frame < num_frames).all()), "frames", "beyond the last frame")
        require_field(bool((depth <= frame + 1).all()), "frames", "before the first frame")
        require_field(bool((next_depth <= next_frame + 1).all()), "frames", "before the first frame")


def _version(number: int) -> int:
    require_field(number <= MAX_VERSION, "number", f"version {number}")
    return number


def _finite(body: memoryview) -> Array:
    values = np.frombuffer(body, "<f4")
    require_field(bool(np.isfinite(values).all()), "values", "a parameter is not finite")
    return values
