"""Encodes and decodes JSON and the control messages, which consist of it. Checks the type of each field.

The header of a control message has schema 0, because a program joins before it knows the schema.
"""

from collections.abc import Sequence
from functools import cache
from operator import methodcaller
from typing import Any

import msgspec

from apex.transport.messages.control import Answer, RefusedAnswer, Request
from apexreplay.types import Stream
from apexreplay.wire.header import WIRE_VERSION, Frame, Header, MessageKind, WireError, pack, require_field, unpack

MAX_JSON_BYTES = 1 << 20

_ENCODER = msgspec.json.Encoder(enc_hook=methodcaller("item"))  # Converts NumPy scalars to Python scalars.
_decoder = cache(msgspec.json.Decoder)


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
        return _ENCODER.encode(_readable(msgspec.to_builtins(message)))


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_readable(name): _readable(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_readable, value))
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def encode_control(message: Request | Answer, run_id: int = 0) -> list[bytes]:
    """Returns one frame: header, JSON."""
    body = encode_json(message)
    return [pack(MessageKind.CONTROL, 0, run_id, Stream(0, 0), 0, 0, 0, [body]) + body]


def decode_answer(frames: Sequence[Frame]) -> Answer:
    """Decodes an answer of the coordinator; raises WireError."""
    answer: Answer = decode_json(_unpack(frames)[1], Answer)
    return answer


def decode_request(frames: Sequence[Frame], run_id: int) -> Request | RefusedAnswer:
    """Decodes a request to the coordinator of the run `run_id`; raises WireError.

    If the sender has another wire version or run id, returns the RefusedAnswer to send, without reading the body.
    """
    header, body = _unpack(frames)
    if header.version != WIRE_VERSION:
        return RefusedAnswer(f"wire version {header.version}, expected {WIRE_VERSION}; install the learner's release")
    if header.run_id not in (0, run_id):
        return RefusedAnswer("the request is for another run")
    request: Request = decode_json(body, Request)
    return request


def _unpack(frames: Sequence[Frame]) -> tuple[Header, memoryview]:
    header, (body,) = unpack(frames, MessageKind.CONTROL, 1)
    header.require_zero("shard", "sender", "schema", "incarnation", "number", "num_items")
    return header, body
