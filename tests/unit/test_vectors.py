"""The messages in docs/reference/vectors.md are those of the code."""

import pytest
from support.vectors import RUN_CODEC, RUN_ID, STORE, STREAM, TABLE_CODEC, VECTORS, documented

from apex.transport.messages.control import ActorHeartbeat, Request, WelcomeAnswer, decode_answer, decode_request
from apexreplay.types import Receipt
from apexreplay.wire import control


@pytest.mark.parametrize("name", VECTORS)
def test_the_page_has_the_bytes_of_each_message(name):
    assert documented()[name] == [bytes(part) for part in VECTORS[name]]


def test_the_page_has_no_other_message():
    assert set(documented()) == set(VECTORS)


@pytest.fixture(scope="module")
def frames():
    return {name: [memoryview(part) for part in parts] for name, parts in documented().items()}


@pytest.mark.parametrize("kind", [control.Request, control.Answer])
def test_each_control_message_of_a_server_of_tables_is_there(frames, kind):
    own = {type(control.decode_message(frames[name], kind)) for name in _names(frames, kind, control.decode_message)}
    assert own == set(kind.__args__)


def test_each_control_message_of_a_run_is_there(frames):
    asked = {type(decode_request(frames[name], RUN_ID)) for name in _names(frames, RUN_ID, decode_request, "run_")}
    assert set(_members(Request)) <= asked
    answers = _names(frames, None, lambda parts, _: decode_answer(parts), "run_")
    assert {"run_welcome", "run_wait", "run_refused", "run_state", "run_status"} <= set(answers)


def _members(union):
    return union.__args__


def _names(frames, argument, decode, prefix=""):
    """Returns the names of the messages that `decode` accepts."""
    found = []
    for name, parts in frames.items():
        if name.startswith("run_") == bool(prefix):
            try:
                decode(parts, argument)
            except ValueError:
                continue
            found.append(name)
    return found


def test_the_messages_of_a_server_of_tables_are_valid(frames):
    segment = TABLE_CODEC.decode_segment(frames["segment"])
    assert (segment.number, segment.base, segment.version) == (5, 4, 9)
    assert segment.records["score"].tolist() == [2.0, -2.0]
    assert TABLE_CODEC.decode_receipts(frames["receipt"]).each() == [Receipt(STREAM, STORE, 6, 0)]
    assert TABLE_CODEC.decode_request(frames["request"]) == 1
    assert TABLE_CODEC.decode_batch(frames["batch"], 1).records["key"].tolist() == [7]
    assert TABLE_CODEC.decode_priorities(frames["priorities"]).priorities.tolist() == [1.5]


def test_the_messages_of_a_run_are_valid(frames):
    welcome, heartbeat = decode_answer(frames["run_welcome"]), decode_request(frames["run_actor_heartbeat"], RUN_ID)
    assert isinstance(welcome, WelcomeAnswer)
    assert isinstance(heartbeat, ActorHeartbeat)
    assert heartbeat.streams == welcome.streams == [STREAM]
    segment = RUN_CODEC.decode_segment(frames["run_segment"])
    assert segment.records[["n_step_return", "next_frame"]].tolist() == [(2.0, 2)]
    assert RUN_CODEC.decode_parameters(frames["run_parameters"], 6).values.tolist() == [0, 1, 2, 3, 4, 5]
    assert RUN_CODEC.decode_evaluation(frames["run_evaluation"], 6)[0].mean == 3.5
