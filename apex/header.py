"""The header that every message begins with: what it is, whose, how long, and its checksum. See docs/protocol.md."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from apex.types import Stream

MAGIC = b"ApeX"
VERSION = 1
# magic, version, kind, shard, run id, sender, schema, incarnation, number, count, length, crc: 52 bytes. The first 20
# name one stream's receipts, so that a SUB can subscribe to them as a prefix.
HEADER = struct.Struct("<4sBBHQIIQQIII")
TOPIC_BYTES = 20
_CRC_OFFSET = HEADER.size - 4

MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 16  # The welcome's configuration is the deepest: 5.
_SURROGATE = re.compile("[\ud800-\udfff]")

Frame = bytes | memoryview


class Kind(IntEnum):
    """The types of message."""

    SEGMENT = 1
    RECEIPT = 2
    BATCH = 3
    PRIORITIES = 4
    PARAMETERS = 5
    CONTROL = 6
    METRICS = 7
    EVALUATION = 8


class WireError(ValueError):
    """A message that was refused. `reason` is one of few words, for counting; the text says more."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class Header(NamedTuple):
    """The header's fields after the magic and the version."""

    kind: Kind
    shard: int
    run_id: int
    sender: int
    schema: int
    incarnation: int
    number: int
    num_items: int
    length: int
    crc: int


def receipt_topic(run_id: int, shard: int, actor_id: int) -> bytes:
    """The prefix that every receipt of one stream begins with."""
    header = HEADER.pack(MAGIC, VERSION, Kind.RECEIPT, shard, run_id, actor_id, 0, 0, 0, 0, 0, 0)
    return header[:TOPIC_BYTES]


def peek_kind(frames: Sequence[Frame]) -> int:
    """The kind that a message claims to be; -1 where it is too short to say."""
    return frames[0][5] if frames and len(frames[0]) >= HEADER.size else -1


def pack(
    kind: Kind, shard: int, run_id: int, stream: Stream, schema: int, number: int, count: int, bodies: Sequence[Frame]
) -> bytes:
    """The header for `bodies`, which follow it."""
    length = sum(len(body) for body in bodies)
    actor, incarnation = stream
    header = HEADER.pack(
        MAGIC, VERSION, kind, shard, run_id, actor, schema, incarnation, number, count, length, 0
    )  # fmt: skip
    crc = zlib.crc32(header[:_CRC_OFFSET])
    for body in bodies:
        crc = zlib.crc32(body, crc)
    return header[:_CRC_OFFSET] + crc.to_bytes(4, "little")


def unpack(frames: Sequence[Frame], kind: Kind, num_frames: int) -> tuple[Header, list[memoryview]]:
    """Returns the header and the bodies: what follows the header in the first frame, then the other frames."""
    require_field(len(frames) == num_frames, "frames", f"{len(frames)} message parts, not {num_frames}")
    first = memoryview(frames[0])
    require_field(len(first) >= HEADER.size, "length", f"{len(first)} bytes are no header")
    magic, version, *fields = HEADER.unpack_from(first)
    require_field(magic == MAGIC, "magic", f"{bytes(first[:4])!r} is not {MAGIC!r}")
    require_field(version == VERSION, "version", f"wire version {version}, but this is {VERSION}")
    require_field(fields[0] == kind, "kind", f"kind {fields[0]}, but {kind.name} is expected here")
    header = Header(kind, *fields[1:])
    bodies = [first[HEADER.size :], *(memoryview(frame) for frame in frames[1:])]
    length = sum(len(body) for body in bodies)
    require_field(header.length == length, "length", f"{length} bytes, the header says {header.length}")
    crc = zlib.crc32(first[:_CRC_OFFSET])
    for body in bodies:
        crc = zlib.crc32(body, crc)
    require_field(header.crc == crc, "crc", f"{crc:08x} is not {header.crc:08x}")
    return header, bodies


def load_json(body: memoryview) -> dict[str, Any]:
    """A JSON object of at most MAX_JSON_BYTES, as the standard has it and no more.

    No name stands twice in an object, every number is one of 64 bits or a finite float, every text can be printed, and
    nothing lies deeper than MAX_JSON_DEPTH.
    """
    require_field(len(body) <= MAX_JSON_BYTES, "length", f"{len(body)} bytes of JSON")
    try:
        message = _JSON.decode(bytes(body).decode())
    except (ValueError, RecursionError) as error:
        raise WireError("json", str(error)[:80]) from error
    require_field(isinstance(message, dict), "json", "not an object")
    _check_depth(message)
    return dict(message)


def dump_json(message: dict[str, Any]) -> bytes:
    """The inverse of `load_json`. JSON has no word for what is not finite: null stands for it.

    For half a character stands a question mark: a path or a host's name may be bytes that are no text.
    """
    try:
        text = json.dumps(message, allow_nan=False, ensure_ascii=False)
    except ValueError:
        text = json.dumps(_without_infinities(message), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace")


def _without_infinities(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_infinities(each) for name, each in value.items()}
    return [_without_infinities(each) for each in value] if isinstance(value, list | tuple) else value


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _read_whole(text: str) -> int:
    number = int(text) if len(text) <= 20 else 2**64  # Longer ones take long to read.
    if not -(2**63) <= number < 2**64:
        raise ValueError("a whole number of more than 64 bits")
    return number


def _read_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(
    object_pairs_hook=_read_object, parse_int=_read_whole, parse_float=_read_float, parse_constant=_refuse_constant
)


def _check_depth(message: dict[str, Any]) -> None:
    """Level by level, so that no depth is too deep to be found; and every text on the way."""
    level: list[Any] = [message]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                require_field(_SURROGATE.search(value) is None, "json", "half a character")
        if not below:
            return
        level = below
    raise WireError("json", f"deeper than {MAX_JSON_DEPTH}")


def require_field(condition: bool, reason: str, text: str) -> None:
    """Raises WireError unless `condition` holds."""
    if not condition:
        raise WireError(reason, text)
