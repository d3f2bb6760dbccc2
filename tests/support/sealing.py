"""Messages that were changed and have a correct checksum again, as an attacker would send."""

import json
import zlib

from apexreplay.wire.header import HEADER


def reseal(frames, **fields):
    """Returns the message with changed header fields."""
    names = ["magic", "version", "kind", "shard", "run_id", "sender", "schema", "incarnation", "number", "count"]
    values = dict(zip([*names, "length", "crc"], HEADER.unpack_from(frames[0]), strict=True))
    bodies = [bytes(frames[0])[HEADER.size :], *map(bytes, frames[1:])]
    values["length"] = sum(map(len, bodies))
    values |= fields
    head = HEADER.pack(*values.values())[:-4]
    crc = zlib.crc32(head)
    for body in bodies:
        crc = zlib.crc32(body, crc)
    return [head + crc.to_bytes(4, "little") + bodies[0], *bodies[1:]]


def with_body(frames, body):
    """Returns the message with another body after the header."""
    return reseal([bytes(frames[0])[: HEADER.size] + body, *frames[1:]])


def with_json(frames, message):
    """Returns the message with this JSON after the header; bytes are inserted unchanged."""
    return with_body(frames, message if isinstance(message, bytes) else json.dumps(message).encode())


def damaged(frames):
    """Returns the message with a flipped bit at its end, and the checksum of before."""
    changed = bytearray(frames[0])
    changed[-1] ^= 1
    return [bytes(changed)]
