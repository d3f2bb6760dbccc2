"""Control messages survive encoding, and decoders refuse invalid ones."""

import json
import math

import msgspec
import pytest
from support.builders import PIXELS
from support.messages import HELLO, RUN, STATUSES, as_json, make_heartbeat, make_run_status
from support.sealing import reseal, with_json

from apex.config import Config, to_dict
from apex.metric_tags import MAX_METRICS
from apex.transport.messages.control import (
    Goodbye,
    Lease,
    RefusedAnswer,
    StateAnswer,
    StatusRequest,
    WaitAnswer,
    WelcomeAnswer,
    decode_answer,
    decode_request,
)
from apex.transport.messages.fields import MAX_TEXT, printable
from apex.transport.messages.results import MAX_SCORES, ActorScores, MetricSum, Scores, ScoreSums
from apex.types import Tensor
from apexreplay.facts import HexInt
from apexreplay.types import Stream
from apexreplay.wire.header import WIRE_VERSION, WireError
from apexreplay.wire.histogram import Histogram
from apexreplay.wire.json_codec import decode_json, encode_control, encode_json

WELCOME = WelcomeAnswer(
    run_id=RUN, config=to_dict(Config()), schema=PIXELS, num_parameters=3, num_actors=2, memory="m",
    replay=[{"experience": "tcp://h:1"}], absent="", streams=[Lease(1, HexInt(2**63 - 1))],
    table={"name": "transitions"}, parameters=[Tensor("body.0.bias", (3,))],
)  # fmt: skip
MORE = {"replay": {"refusals": {"crc": 1}, "priority_histogram": Histogram([1.0], [0.5, 1.0])}}
SCORES = Scores([ActorScores(0, 2, 7.5, 30), ActorScores(3, 1, None, 4)], faults=1)


def decode(message):
    return decode_request(with_json(encode_control(StatusRequest(), RUN), message), RUN)


def test_requests_survive_encoding():
    heartbeats = [make_heartbeat(role, **MORE.get(role, {})) for role in STATUSES]
    actor = make_heartbeat("actor", streams=[Stream(0, 1)], scores=SCORES)
    for request in (*heartbeats, actor, HELLO, StatusRequest(), Goodbye(5)):
        assert decode_request(encode_control(request, RUN), RUN) == request


def test_answers_survive_encoding():
    wait = WaitAnswer(holder=1, host="h", run_id=RUN)
    for answer in (WELCOME, RefusedAnswer("no"), wait, StateAnswer(True), make_run_status()):
        assert decode_answer(encode_control(answer, RUN)) == answer


def test_a_welcome_has_no_number_above_2_to_the_53():
    """Such numbers are not exact in every language."""
    wide = msgspec.structs.replace(WELCOME, run_id=HexInt(2**64 - 1))
    answer = json.loads(encode_json(wide), parse_int=lambda digits: require_exact(int(digits)))
    assert (answer["run_id"], answer["streams"]) == ("f" * 16, [[1, "7" + "f" * 15]])
    assert decode_answer(encode_control(wide)) == wide


def require_exact(number):
    assert abs(number) < 2**53
    return number


def test_large_numbers_of_a_heartbeat_may_be_texts_or_numbers():
    texts = {**ACTOR, "run_id": f"{RUN:x}", "streams": [[0, "7fffffffffffffff"]]}
    numbers = {**ACTOR, "run_id": RUN, "streams": [[0, 2**63 - 1]]}
    assert decode(texts) == decode(numbers)
    assert decode(texts).streams == [(0, 2**63 - 1)]


@pytest.mark.parametrize("body", [b'{"type": "hello", "anything": [1]}', b"\x00 no JSON"])
@pytest.mark.parametrize("field", [{"version": WIRE_VERSION + 1}, {"run_id": RUN + 1}])
def test_requests_of_another_version_or_run_are_answered_unread(body, field):
    answer = decode_request(reseal(with_json(encode_control(HELLO, RUN), body), **field), RUN)
    assert isinstance(answer, RefusedAnswer)
    if "version" in field:
        assert f"{WIRE_VERSION + 1}, expected {WIRE_VERSION}" in answer.reason


def test_refusals_are_read_from_any_wire_version():
    assert decode_answer(reseal(encode_control(RefusedAnswer("no")), version=WIRE_VERSION + 1)) == RefusedAnswer("no")


BEAT, ACTOR, GREETING = as_json(make_heartbeat()), as_json(make_heartbeat("actor")), as_json(HELLO)
ENDPOINTS = (
    *("garbage", "tcp://my host:21002", "tcp://user@h:21002", "tcp://h:0", "tcp://h:65536", "tcp://h:5\u0663"),
    *("tcp://-h:21002", "tcp://[::1]:21002", "ipc:///x"),
)
HISTOGRAMS = (
    {"counts": "many"},
    {"counts": [1e17], "edges": [0.5, 1.0]},
    {"counts": [-1.0], "edges": [0.5, 1.0]},
    {"counts": [1.0], "edges": [0.5, 0.5]},
    {"counts": [1.0], "edges": [0.5]},
    {"counts": [1.0], "edges": [0.5, 1e200]},
    {"counts": [1.0], "edges": [0.0, 1.0]},
    {"counts": [], "edges": [1.0]},
    {"counts": [0.0] * 257, "edges": list(range(1, 259))},
)
INVALID_STATUSES = (
    *({"num_inserted": value} for value in (1e9, -1)),
    *({"size": value} for value in (2**62 + 1, 10**400, None)),
    *({"busy_share": value} for value in ([0.5], 1.7e308, False)),
    *({"refusals": value} for value in ({"crc": "many"}, {"a\n": 1}, {str(number): 1 for number in range(65)})),
    *({"priority_histogram": value} for value in HISTOGRAMS),
    {"store_incarnation": "a" * 201},
    {"store_incarnation": "\u202e"},
    {"inserts_wait": 0},
    {"samplers_wait_for": "anything"},
    {"figure": 1},
)
NO_HEX = (-1, 2**64, 1.0, True, None, "", "f" * 17, "FF", "1\n", "0x1", "\u0661")
INVALID_SCORES = (
    *([[0, 1, 1.0]], [[-1, 1, 1.0, 1]], [[2**32, 1, 1.0, 1]], [[0, 0, 1.0, 1]], [[0, 1.0, 1.0, 1]]),
    *([[0, 1, "1", 1]], [[0, 1, 1e301, 1]], [[0, 1, 1.0, -1]], [[0, 1, 1.0, 1]] * (MAX_SCORES + 1)),
)


@pytest.mark.parametrize(
    "message",
    [
        *({}, {"type": "what"}, {"type": ["hello"]}, {"type": "welcome"}, {"type": "heartbeat"}),
        *({"type": "status", "more": 1}, {"type": "goodbye"}, {"type": "goodbye", "session": 5.0}, {"type": "hello"}),
        *({name: value for name, value in GREETING.items() if name != gone} for gone in GREETING),
        *({**GREETING, "wire": wire} for wire in (WIRE_VERSION + 1, str(WIRE_VERSION))),
        *({**GREETING, "num_streams": number} for number in (-1, 65_537)),
        *({**GREETING, "session": session} for session in (-1, 2**63, "x")),
        *({**GREETING, "role": role} for role in (["actor"], "learner")),
        *({**GREETING, "host": host} for host in ("\x1b[2J", "a" * 201, "J\u00fcrgen")),
        {**GREETING, "pid": True},
        {**GREETING, "shard": 2**31},
        *({**ACTOR, "streams": value} for value in ([[0]], [[0, 1, 2]], [["0", 1]], [[2**32, 1]])),
        *({**ACTOR, "streams": [[0, value]]} for value in NO_HEX),
        *({**ACTOR, "run_id": value} for value in NO_HEX),
        {**ACTOR, "streams": [[0, 1]] * 65_537},
        *({**beat, "streams": [[0, 1]]} for beat in (BEAT, as_json(make_heartbeat("evaluator")))),
        *({**GREETING, "role": role} for role in ("replay", "evaluator")),  # with num_streams
        *({**BEAT, "endpoints": {"priorities": endpoint}} for endpoint in ENDPOINTS),
        *({**BEAT, "endpoints": value} for value in ([], {"a\n": "tcp://h:1"})),
        {**BEAT, "endpoints": {str(number): "tcp://h:1" for number in range(17)}},
        *({**BEAT, "fence": value} for value in (-1, 2**63, 1.0, "1", None)),
        {**BEAT, "status": []},
        {**BEAT, "more": 1},
        {**BEAT, "scores": as_json(SCORES)},
        *({**BEAT, "type": f"{role}_heartbeat"} for role in ("actor", "evaluator", "learner", "observer")),
        *({**BEAT, "status": {**BEAT["status"], **fields}} for fields in INVALID_STATUSES),
        *({**ACTOR, "scores": {"actors": actors}} for actors in INVALID_SCORES),
        *({**ACTOR, "scores": scores} for scores in ({}, {"actors": [], "faults": -1}, {"actors": [], "more": 1})),
    ],
)
def test_invalid_requests_are_refused(message):
    with pytest.raises(WireError) as error:
        decode(message)
    assert error.value.reason == "fields"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "json"),
        (b"[]", "fields"),
        (b"\xff\xfe", "json"),
        (b"[" * 100_000, "fields"),
        (b'{"a":' * 100_000, "json"),
        (b'{"type": "status"}' + b" " * (1 << 20), "length"),
        *((b'{"type": "goodbye", "session": %s}' % text, "json") for text in (b"NaN", b"-Infinity", b"01", b"5}x")),
        *(
            (b'{"type": "goodbye", "session": %s}' % text, "fields")
            for text in (b"1e999", b"9" * 5_000, b"-1", b'"5"', b"[" * 16 + b"]" * 16, b'1, "session": null')
        ),
        *((b'{"type": "%s"}' % text, "json") for text in (b"\\ud800", b"\xff")),
        (b'{"type": "status", "type": "goodbye", "session": 5}', "fields"),
    ],
)
def test_malformed_json_is_refused(body, reason):
    with pytest.raises(WireError) as error:
        decode(body)
    assert error.value.reason == reason


@pytest.mark.parametrize("field", ["shard", "sender", "schema", "incarnation", "number"])
def test_unused_header_fields_must_be_zero(field):
    with pytest.raises(WireError) as error:
        decode_request(reseal(encode_control(StatusRequest(), RUN), **{field: 1}), RUN)
    assert error.value.reason == field


@pytest.mark.parametrize("body", [{"type": "hello"}, {"type": "refused"}, {"type": "state", "stop": 1}, {"stop": True}])
def test_invalid_answers_are_refused(body):
    with pytest.raises(WireError) as error:
        decode_answer(with_json(encode_control(StatusRequest()), body))
    assert error.value.reason == "fields"


def test_lone_surrogates_become_question_marks():
    answer = RefusedAnswer("L\u00e4ufe/\udcff\U0001f600")
    assert decode_answer(encode_control(answer)) == RefusedAnswer("L\u00e4ufe/?\U0001f600")


def test_figures_that_are_not_finite_become_null():
    figures = {"policy_loss": float("nan")}
    status = make_run_status(learner={"loss": float("nan"), "figures": figures}, policy_lag=float("inf"))
    arrived = decode_answer(encode_control(status))
    assert (arrived.learner.loss, arrived.policy_lag, arrived.learner.figures) == (None, None, {"policy_loss": None})
    assert decode_json(encode_json(Scores([ActorScores(0, 1, math.inf, 1)])), Scores).actors[0].score is None


def test_host_names_of_any_bytes_become_printable():
    text = printable("a\x1b[2J\udcff\n" + "b" * 300)
    assert text.startswith("a?[2J??b")
    assert len(text) == MAX_TEXT
    assert decode({**GREETING, "host": text}).host == text


def test_scores_add_up_until_they_are_taken():
    sums = ScoreSums()
    assert sums.take() is None
    sums.add(SCORES)
    sums.add(Scores([ActorScores(0, 1, 0.5, 5), ActorScores(3, 1, 1.0, 1)], faults=2))
    first, second = sums.take(1), sums.take()
    assert (first.actors, first.faults) == ([(0, 3, 8.0, 35)], 3)
    ((actor_id, games, score, length),) = second.actors
    assert (actor_id, games, score, length, second.faults) == (3, 2, None, 5, 0)
    assert sums.take() is None
    sums.add(Scores([], faults=1))
    assert sums.take() == Scores([], faults=1)


def test_metrics_add_up_by_name_and_further_names_are_ignored():
    sums = ScoreSums()
    sums.add(Scores([], metrics={f"field_{i}": MetricSum(1, i) for i in range(MAX_METRICS)}))
    sums.add(Scores([], metrics={"field_3": MetricSum(2, 0.5), "more": MetricSum(1, 1.0)}))
    taken = sums.take(1)
    assert (len(taken.metrics), taken.metrics["field_3"]) == (MAX_METRICS, (3, 3.5))
    assert decode_json(encode_json(taken), Scores) == taken
    assert sums.take() is None
