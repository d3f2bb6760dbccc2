"""Encodes and decodes JSON and control messages, which consist of it, and checks the type of each field."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec

from apexreplay.facts import HexInt
from apexreplay.types import Stream
from apexreplay.wire.header import Frame, Header, MessageKind, WireError, pack, require_field, unpack

MAX_JSON_BYTES = 1 << 20
HEXADECIMAL = frozenset("0123456789abcdef")


def _encode_other(value: Any) -> Any:
    """Returns what stands in JSON for a HexInt or a NumPy scalar."""
    return f"{value:x}" if isinstance(value, HexInt) else value.item()


def decode_other(kind: type[HexInt], value: object) -> HexInt:
    """Returns the HexInt that a text or a number in JSON stands for; raises ValueError."""
    if type(value) is str and 1 <= len(value) <= 16 and HEXADECIMAL.issuperset(value):
        return kind(value, 16)
    if type(value) is int and 0 <= value < 2**64:
        return kind(value)
    raise ValueError("Expected 1 to 16 hexadecimal digits, or a number below 2^64")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_other)
_decoder = cache(partial(msgspec.json.Decoder, dec_hook=decode_other))


def decode_json(body: Frame, kind: Any) -> Any:
    """Decodes standard JSON of at most MAX_JSON_BYTES to the type `kind`; raises WireError."""
    require_field(len(body) <= MAX_JSON_BYTES, "length", f"{len(body)} bytes of JSON, maximum is {MAX_JSON_BYTES}")
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise WireError("fields", str(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("json", str(error)[:80]) from error


def encode_json(message: Any) -> bytes:
    """Encodes a record as JSON. Numbers that are not finite become null.

    Lone surrogates, which occur in paths that are not valid UTF-8, become question marks.
    """
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(_readable(msgspec.to_builtins(message, enc_hook=_encode_other)))


def encode_control(message: Any, run_id: int = 0) -> list[bytes]:
    """Returns one frame: header, JSON. The schema is 0, because a program joins before it knows the schema."""
    body = encode_json(message)
    return [pack(MessageKind.CONTROL, 0, run_id, Stream(0, 0), 0, 0, 0, [body]) + body]


def open_control(frames: Sequence[Frame]) -> tuple[Header, memoryview]:
    """Returns the header and the JSON of what `encode_control` wrote; raises WireError."""
    header, (body,) = unpack(frames, MessageKind.CONTROL, 1)
    header.require_zero("shard", "sender", "schema", "incarnation", "number", "num_items")
    return header, body


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_readable(name): _readable(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_readable, value))
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
