"""Messages of the control socket: what was encoded is decoded, and nothing else is accepted."""

import json

import msgspec
import pytest

from apexreplay.types import Stream
from apexreplay.wire.control import (
    Alive,
    Answer,
    Beat,
    Bye,
    Hello,
    Later,
    Refusal,
    Request,
    ServerStatus,
    StatusRequest,
    TableStatus,
    Welcome,
    decode_message,
)
from apexreplay.wire.header import HEADER, MessageKind, WireError, pack
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_control

WELCOME = Welcome(
    session=2**53 - 1,
    run_id="f" * 16,
    table={"name": "t", "steps": {"x": {"shape": [1, 2]}}},
    experience=1,
    priorities=2,
    receipts=3,
    batches=[4, 5],
    stream=-1,
    incarnation="0",
    window=6,
    segment_length=7,
    row=8,
    num_rows=9,
    max_batch=11,
    limiter=(10, 0.5, 0.25, True),
)
TABLE = TableStatus(capacity=1, writers=2, samplers=3, replay=None)
REQUESTS = [
    Hello(session=0, role="writer", table="t", run_id="abc", stream=2**32 - 1, incarnation="f" * 16),
    Hello(session=1, role="sampler", table="t", memory="boot:1:2", row=3),
    Beat(session=2),
    Bye(session=3),
    StatusRequest(session=4),
]
ANSWERS = [
    WELCOME,
    Alive(session=1),
    Later(session=2),
    Refusal(session=3, reason="no_table", subject="a, b"),
    ServerStatus(session=4, tables={"t": TABLE}, refused_connections={"control": 1}, refusals={"crc": 2}),
]


def frame(text, *, kind=MessageKind.CONTROL, shard=0, run_id=0, stream=(0, 0), schema=0, number=0, count=0):
    body = text.encode()
    return [pack(kind, shard, run_id, Stream(*stream), schema, number, count, [body]) + body]


@pytest.mark.parametrize(("messages", "kind"), [(REQUESTS, Request), (ANSWERS, Answer)], ids=["requests", "answers"])
def test_messages_are_decoded_as_they_were_encoded(messages, kind):
    for message in messages:
        assert decode_message(encode_control(message), kind) == message
        other = Answer if kind is Request else Request
        with pytest.raises(WireError, match=r"^fields"):
            decode_message(encode_control(message), other)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"type": "hello", "session": -1}, "fields"),
        ({"type": "hello", "session": 2**53}, "fields"),
        ({"session": 1.5}, "fields"),
        ({"session": "1"}, "fields"),
        ({"role": "administrator"}, "fields"),
        ({"table": "x" * 201}, "fields"),
        ({"table": "\x1b[2J"}, "fields"),
        ({"table": None}, "fields"),
        ({"memory": ["x"]}, "fields"),
        ({"run_id": "0x1"}, "fields"),
        ({"run_id": "F"}, "fields"),
        ({"run_id": ""}, "fields"),
        ({"run_id": "1\n"}, "fields"),
        ({"incarnation": "1" * 17}, "fields"),
        ({"stream": -2}, "fields"),
        ({"stream": 2**32}, "fields"),
        ({"row": -2}, "fields"),
        ({"row": 1_024}, "fields"),
        ({"more": 1}, "fields"),
        ({"type": "status"}, "fields"),
        ({"type": "nonsense"}, "fields"),
    ],
    ids=str,
)
def test_a_request_with_another_field_is_refused(changed, reason):
    good = {"type": "hello", "session": 1, "role": "writer", "table": "t"}
    assert decode_message(frame(json.dumps(good)), Request).table == "t"
    with pytest.raises(WireError, match=rf"^{reason}"):
        decode_message(frame(json.dumps({**good, **changed})), Request)


@pytest.mark.parametrize(
    "changed",
    [
        {"experience": 0},
        {"receipts": 65_536},
        {"batches": [1] * 17},
        {"stream": 2**32},
        {"window": 64},
        {"segment_length": 0},
        {"row": 1_024},
        {"num_rows": 2**40},
        {"max_batch": 0},
        {"max_batch": 65_537},
        {"path": "/home/user/file"},
    ],
    ids=str,
)
def test_a_welcome_with_a_number_out_of_range_or_a_path_is_refused(changed):
    """A client that has reached a stranger's server maps no file that the message names, and allocates little."""
    good = json.loads(msgspec.json.encode(WELCOME))
    assert decode_message(frame(json.dumps(good)), Answer) == WELCOME
    with pytest.raises(WireError, match=r"^fields"):
        decode_message(frame(json.dumps({**good, **changed})), Answer)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "json"),
        ("{", "json"),
        ('{"x":' * 100_000, "json"),
        ('{"type":"beat","session":NaN}', "json"),
        ("[]", "fields"),
        ("null", "fields"),
        ('{"session":1}', "fields"),
        ('{"type":"beat"}', "fields"),
        (" " * (MAX_JSON_BYTES + 1), "length"),
    ],
    ids=lambda text: text[:20],
)
def test_hostile_json_is_refused(text, reason):
    with pytest.raises(WireError, match=rf"^{reason}"):
        decode_message(frame(text), Request)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"shard": 1}, "shard"),
        ({"run_id": 1}, "run_id"),
        ({"stream": (1, 0)}, "sender"),
        ({"stream": (0, 1)}, "incarnation"),
        ({"schema": 1}, "schema"),
        ({"number": 1}, "number"),
        ({"count": 1}, "num_items"),
        ({"kind": MessageKind.REQUEST}, "kind"),
    ],
    ids=str,
)
def test_a_wrong_header_is_refused(changed, reason):
    with pytest.raises(WireError, match=rf"^{reason}"):
        decode_message(frame('{"type":"beat","session":1}', **changed), Request)


def test_a_damaged_message_is_refused():
    (good,) = encode_control(REQUESTS[0])
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_message([bytes(damaged)], Request)
    for frames in ([], [b""], [good[: HEADER.size - 1]], [good[:-1]], [good + b" "], [good, b""]):
        with pytest.raises(WireError):
            decode_message(frames, Request)
