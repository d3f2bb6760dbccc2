"""Encodes and decodes the control messages, which consist of JSON.

The header of a control message has schema 0, because a program joins before it knows the schema.
"""

from collections.abc import Sequence

from apex.transport.messages.control import Answer, RefusedAnswer, Request
from apexreplay.types import Stream
from apexreplay.wire.header import WIRE_VERSION, Frame, Header, MessageKind, pack, unpack
from apexreplay.wire.json_codec import decode_json, encode_json


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
