"""Encodes and decodes control messages. Their header has schema 0, as a program joins before it knows the schema."""

from __future__ import annotations

from collections.abc import Sequence

from apex.transport.header import WIRE_VERSION, Frame, Header, MessageKind, pack, require_field, unpack
from apex.transport.json_codec import convert, encode_json, parse_json, require_printable
from apex.transport.messages.control import REQUESTS, Answer, RefusedAnswer, Request
from apex.types import Stream


def encode_control(message: Request | Answer, run_id: int = 0) -> list[bytes]:
    """Returns one frame: header, JSON."""
    body = encode_json(message)
    return [pack(MessageKind.CONTROL, 0, run_id, Stream(0, 0), 0, 0, 0, [body]) + body]


def decode_answer(frames: Sequence[Frame]) -> Answer:
    """Decodes an answer of the coordinator; raises WireError."""
    _, body = _unpack(frames)
    answer: Answer = convert(parse_json(body), Answer)
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
    message = parse_json(body)
    kind = message.get("type")
    require_field(isinstance(kind, str) and kind in REQUESTS, "type", f"unknown request {str(kind)[:40]!r}")
    require_printable(message)
    request: Request = convert(message, REQUESTS[str(kind)])
    return request


def _unpack(frames: Sequence[Frame]) -> tuple[Header, memoryview]:
    header, (body,) = unpack(frames, MessageKind.CONTROL, 1)
    header.require_zero("shard", "sender", "schema", "incarnation", "number", "num_items")
    return header, body
