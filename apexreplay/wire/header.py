"""The header at the beginning of every message: kind, sender, length, checksum and more. See docs/protocol.md."""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from apexreplay.crc32 import crc32
from apexreplay.types import Stream

MAGIC = b"ApeX"
WIRE_VERSION = 6
# magic, version, kind, shard, run id, sender, schema, incarnation, number, count, length, crc: 52 bytes.
# The first 20 bytes of a message of receipts identify its group: a SUB socket subscribes to these bytes as a prefix.
HEADER = struct.Struct("<4sBBHQIIQQIII")
TOPIC_BYTES = 20
_CRC_OFFSET = HEADER.size - 4


Frame = bytes | memoryview


class MessageKind(IntEnum):
    """The types of message."""

    SEGMENT = 1
    RECEIPT = 2
    BATCH = 3
    PRIORITIES = 4
    PARAMETERS = 5
    CONTROL = 6
    EVALUATION = 7
    REQUEST = 8


class WireError(ValueError):
    """A message was refused. `reason` is a short name under which refusals are counted; `text` has the details."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class Header(NamedTuple):
    """The header's fields after the magic."""

    version: int
    kind: MessageKind
    shard: int
    run_id: int
    sender: int
    schema: int
    incarnation: int
    number: int
    num_items: int
    length: int
    crc: int

    def require_zero(self, *fields: str) -> None:
        """Raises WireError unless these fields, which this kind of message does not use, are 0."""
        for name in fields:
            require_field(getattr(self, name) == 0, name, f"{name} {getattr(self, name)}, must be 0 in this message")


def receipt_topic(run_id: int, shard: int, group: int) -> bytes:
    """Returns the first TOPIC_BYTES bytes, which are equal in all receipts of a group from a shard."""
    header = HEADER.pack(MAGIC, WIRE_VERSION, MessageKind.RECEIPT, shard, run_id, group, 0, 0, 0, 0, 0, 0)
    return header[:TOPIC_BYTES]


def peek_kind(frames: Sequence[Frame]) -> int:
    """Returns the kind from the header without checking it; -1 if the message is shorter than a header."""
    return frames[0][5] if frames and len(frames[0]) >= HEADER.size else -1


def pack(
    kind: MessageKind,
    shard: int,
    run_id: int,
    stream: Stream,
    schema: int,
    number: int,
    count: int,
    bodies: Sequence[Frame],
) -> bytes:
    """Returns the header of a message with these `bodies`."""
    length = sum(len(body) for body in bodies)
    actor, incarnation = stream
    header = HEADER.pack(
        MAGIC, WIRE_VERSION, kind, shard, run_id, actor, schema, incarnation, number, count, length, 0
    )  # fmt: skip
    return header[:_CRC_OFFSET] + checksum(header, bodies).to_bytes(4, "little")


def unpack(frames: Sequence[Frame], kind: MessageKind, num_frames: int) -> tuple[Header, list[memoryview]]:
    """Returns the header and the bodies: the rest of the first frame, then the other frames. Raises WireError."""
    require_field(len(frames) == num_frames, "frames", f"{len(frames)} message parts, expected {num_frames}")
    first = memoryview(frames[0])
    require_field(len(first) >= HEADER.size, "length", f"{len(first)} bytes, but a header has {HEADER.size}")
    magic, version, *fields = HEADER.unpack_from(first)
    require_field(magic == MAGIC, "magic", f"the message begins with {bytes(first[:4])!r}, expected {MAGIC!r}")
    is_control = kind == MessageKind.CONTROL  # The receiver of a request answers another version.
    require_field(version == WIRE_VERSION or is_control, "version", f"wire version {version}, expected {WIRE_VERSION}")
    require_field(fields[0] == kind, "kind", f"message kind {fields[0]}, expected {kind:d} ({kind.name})")
    header = Header(version, kind, *fields[1:])
    bodies = [first[HEADER.size :], *(memoryview(frame) for frame in frames[1:])]
    length = sum(len(body) for body in bodies)
    require_field(header.length == length, "length", f"{length} bytes, but the header says {header.length}")
    crc = checksum(first, bodies)
    require_field(header.crc == crc, "crc", f"checksum {crc:08x}, but the header says {header.crc:08x}")
    return header, bodies


def checksum(header: Frame, bodies: Sequence[Frame]) -> int:
    """Returns the CRC-32 of a header, without its own field `crc`, and of the bodies."""
    crc = crc32(header[:_CRC_OFFSET])
    for body in bodies:
        crc = crc32(body, crc)
    return crc


def require_field(condition: bool, reason: str, text: str) -> None:
    """Raises WireError unless `condition` holds."""
    if not condition:
        raise WireError(reason, text)
