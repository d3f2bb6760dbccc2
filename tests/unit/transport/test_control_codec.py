"""Control messages come back as they were sent, and everything that they cannot be is refused."""

from __future__ import annotations

import pytest
from support.builders import PIXELS
from support.messages import HELLO, RUN, STATUSES, as_json, make_heartbeat, make_run_status
from support.sealing import reseal, with_json

from apex.config import Config, to_dict
from apex.facts import MAX_TEXT
from apex.transport.control_codec import decode_answer, decode_request, encode_control
from apex.transport.header import WIRE_VERSION, WireError
from apex.transport.messages.control import (
    Goodbye,
    RefusedAnswer,
    StateAnswer,
    StatusRequest,
    WaitAnswer,
    WelcomeAnswer,
)
from apex.transport.messages.fields import printable
from apex.transport.messages.histogram import Histogram
from apex.types import Stream

WELCOME = WelcomeAnswer(
    run_id=RUN, config=to_dict(Config()), schema=PIXELS, num_parameters=3, num_actors=2, memory="m",
    replay=[{"experience": "tcp://h:1"}], absent="", streams=[Stream(1, 2**40)],
)  # fmt: skip
REFUSALS = {
    "replay": {"refusals": {"crc": 1}, "priority_histogram": Histogram([1.0], [0.5, 1.0])},
    "actor": {},
    "evaluator": {},
}


def decode(message):
    """What becomes of a message that says this."""
    return decode_request(with_json(encode_control(StatusRequest(), RUN), message), RUN)


@pytest.mark.parametrize(
    "request_",
    [
        *(make_heartbeat(role, streams=[Stream(0, 1)], **REFUSALS[role]) for role in STATUSES),
        HELLO,
        StatusRequest(),
        Goodbye(5),
    ],
)
def test_requests_come_back(request_):
    assert decode_request(encode_control(request_, RUN), RUN) == request_


@pytest.mark.parametrize(
    "answer",
    [WELCOME, RefusedAnswer("no"), WaitAnswer(holder=1, host="h", run_id=RUN), StateAnswer(True), make_run_status()],
)
def test_answers_come_back(answer):
    assert decode_answer(encode_control(answer, RUN)) == answer


@pytest.mark.parametrize("body", [b'{"type": "hello", "anything": [1]}', b"\x00 no JSON"])
@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (
            {"version": WIRE_VERSION + 1},
            f"wire version {WIRE_VERSION + 1}, expected {WIRE_VERSION}; install the learner's release",
        ),
        ({"run_id": RUN + 1}, "the request is for another run"),
    ],
)
def test_who_speaks_another_wire_version_or_belongs_to_another_run_is_told_whatever_it_says(body, field, reason):
    frames = reseal(with_json(encode_control(HELLO, RUN), body), **field)
    assert decode_request(frames, RUN) == RefusedAnswer(reason)


def test_a_refusal_is_understood_by_a_program_of_another_wire_version():
    assert decode_answer(reseal(encode_control(RefusedAnswer("no")), version=WIRE_VERSION + 1)) == RefusedAnswer("no")


BEAT, GREETING = as_json(make_heartbeat()), as_json(HELLO)


def with_status(**fields):
    return {**BEAT, "status": {**BEAT["status"], **fields}}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, "type"),
        ({"type": "what"}, "type"),
        ({"type": ["hello"]}, "type"),
        ({"type": "welcome"}, "type"),
        ({"type": "status", "more": 1}, "fields"),
        ({"type": "goodbye"}, "fields"),
        ({"type": "goodbye", "session": 5.0}, "fields"),
        ({"type": "hello"}, "fields"),
        ({"type": "hello", "session": 5, "wire": "1"}, "fields"),
        ({"type": "heartbeat", "session": "x"}, "fields"),
        *(({name: value for name, value in GREETING.items() if name != gone}, "fields") for gone in ("role", "pid")),
        ({**GREETING, "wire": WIRE_VERSION + 1}, "fields"),
        ({**GREETING, "num_streams": -1}, "fields"),
        ({**GREETING, "num_streams": 65_537}, "fields"),
        ({**GREETING, "session": 2**63}, "fields"),
        ({**GREETING, "session": -1}, "fields"),
        ({**GREETING, "role": ["actor"]}, "fields"),
        ({**GREETING, "role": "learner"}, "fields"),
        ({**GREETING, "host": "\x1b[2J"}, "fields"),
        ({**GREETING, "host": "a" * 201}, "fields"),
        ({**GREETING, "pid": True}, "fields"),
        ({**GREETING, "shard": 2**31}, "fields"),
        ({**BEAT, "streams": [[0]]}, "fields"),
        ({**BEAT, "streams": [[0, 1, 2]]}, "fields"),
        ({**BEAT, "streams": [["0", 1]]}, "fields"),
        ({**BEAT, "streams": [[2**32, 1]]}, "fields"),
        ({**BEAT, "streams": [[0, 2**63]]}, "fields"),
        ({**BEAT, "streams": [[0, 1]] * 65_537}, "fields"),
        ({**BEAT, "endpoints": []}, "fields"),
        ({**BEAT, "endpoints": {str(number): "x" for number in range(17)}}, "fields"),
        ({**BEAT, "endpoints": {"a\n": "x"}}, "fields"),
        ({**BEAT, "status": []}, "fields"),
        ({**BEAT, "more": 1}, "fields"),
        *(
            ({**BEAT, "endpoints": {"priorities": endpoint}}, "fields")
            for endpoint in (
                "garbage",
                "tcp://my host:21002",
                "tcp://user@h:21002",
                "tcp://h:0",
                "tcp://h:65536",
                "tcp://h:5\u0663",
                "tcp://-h:21002",
                "tcp://[::1]:21002",
                "ipc:///x",
            )
        ),
        *(({**BEAT, "role": role}, "fields") for role in ("actor", "evaluator", "learner", "observer")),
        (with_status(waiting=[1]), "fields"),
        (with_status(waiting={"what": "Godot"}), "fields"),
        (with_status(waiting={"what": "learner", "subject": "a" * 201}), "fields"),
        (with_status(waiting={"what": "learner", "subject": "\u202e"}), "fields"),
        (with_status(num_inserted=1e9), "fields"),
        (with_status(num_inserted=-1), "fields"),
        (with_status(size=2**62 + 1), "fields"),
        (with_status(size=None), "fields"),
        (with_status(busy_share=[0.5]), "fields"),
        (with_status(busy_share=1.7e308), "fields"),
        (with_status(busy_share=False), "fields"),
        (with_status(inserts_wait=0), "fields"),
        (with_status(samplers_wait_for="godot"), "fields"),
        (with_status(refusals={"crc": "many"}), "fields"),
        (with_status(refusals={str(number): 1 for number in range(65)}), "fields"),
        (with_status(figure=1), "fields"),
        (with_status(priority_histogram={"counts": "many"}), "fields"),
        (with_status(priority_histogram={"counts": [1e17], "edges": [0.5, 1.0]}), "fields"),
        (with_status(priority_histogram={"counts": [-1.0], "edges": [0.5, 1.0]}), "fields"),
        (with_status(priority_histogram={"counts": [1.0], "edges": [0.5, 0.5]}), "fields"),
        (with_status(priority_histogram={"counts": [1.0], "edges": [0.5]}), "fields"),
        (with_status(priority_histogram={"counts": [1.0], "edges": [0.5, 1e200]}), "fields"),
        (with_status(priority_histogram={"counts": [1.0], "edges": [0.0, 1.0]}), "fields"),
        (with_status(priority_histogram={"counts": [], "edges": [1.0]}), "fields"),
        (with_status(priority_histogram={"counts": [0.0] * 257, "edges": list(range(1, 259))}), "fields"),
    ],
)
def test_refuses_requests_that_cannot_be(message, reason):
    with pytest.raises(WireError) as refusal:
        decode(message)
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "json"),
        (b"[]", "json"),
        (b"\xff\xfe", "json"),
        (b"[" * 100_000, "json"),
        (b" " * (1 << 20) + b"{}", "length"),
        *(
            (b'{"type": "status", "n": %s}' % text, "json")
            for text in (
                b"NaN",
                b"-Infinity",
                b"1e999",
                b"18446744073709551616",
                b"-9223372036854775809",
                b"9" * 5_000,
                b'"\\ud800"',
                b"[" * 16 + b"]" * 16,
                b'[["\\udfff"]]',
                b'{"a": 1, "a": 2}',
                b'{"a": 1, "\\u0061": 2}',
                b'1, "type": "y"',
            )
        ),
    ],
)
def test_refuses_what_is_not_strict_json(body, reason):
    with pytest.raises(WireError) as refusal:
        decode(body)
    assert refusal.value.reason == reason


@pytest.mark.parametrize("field", ["shard", "sender", "schema", "incarnation", "number"])
def test_refuses_a_header_field_that_means_nothing(field):
    with pytest.raises(WireError, match=field):
        decode_request(reseal(encode_control(StatusRequest(), RUN), **{field: 1}), RUN)


@pytest.mark.parametrize("body", [{"type": "hello"}, {"type": "refused"}, {"type": "state", "stop": 1}, {"stop": True}])
def test_refuses_answers_that_cannot_be(body):
    with pytest.raises(WireError, match="fields"):
        decode_answer(with_json(encode_control(StatusRequest()), body))


def test_what_is_no_text_arrives_as_something_that_can_be_printed():
    answer = RefusedAnswer("L\u00e4ufe/\udcff\U0001f600")
    assert decode_answer(encode_control(answer)) == RefusedAnswer("L\u00e4ufe/?\U0001f600")


def test_a_figure_that_is_not_finite_arrives_as_null():
    status = make_run_status(
        learner={"loss": float("nan"), "figures": {"policy_loss": float("nan")}}, policy_lag=float("inf")
    )
    arrived = decode_answer(encode_control(status))
    assert (arrived.learner.loss, arrived.policy_lag) == (None, None)
    assert arrived.learner.figures == {"policy_loss": None}


def test_a_host_may_have_any_bytes_for_a_name():
    shown = printable("a\x1b[2J\udcff\n" + "b" * 300)
    assert shown.startswith("a?[2J??b")
    assert shown.isprintable()
    assert len(shown) == MAX_TEXT
    assert printable("J\u00fcrgens PC") == "J\u00fcrgens PC"
