"""What a connection does with answers while it holds a lease."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from apexreplay.client.client import Client
from apexreplay.client.connection import Connection
from apexreplay.client.waiting import block
from apexreplay.errors import DataError, UsageError
from apexreplay.wire.control import Alive, Beat, Hello, Later, Refusal, StatusRequest, Welcome

LEASE = {"run_id": "7", "stream": 1, "incarnation": "100000001"}
HELLO = Hello(session=5, role="writer", table="t", **LEASE)
PLACES = {"experience": 1, "priorities": 2, "receipts": 3, "batches": []}
WELCOME = {
    "session": 5, "table": {}, "window": 1, "segment_length": 1, "row": -1, "num_rows": 1, "max_batch": 1,
    "limiter": (1, 0.0, 0.0, False), **PLACES, **LEASE,
}  # fmt: skip


def keep_lease(connection, hello=HELLO, segment_length=1, inserts_wait=False):
    """Returns the list of the answers that the lease takes."""
    welcomed = []
    facts = {
        "hello": hello,
        "port": 1,
        "segment_length": segment_length,
        "declaration": {},
        "inserts_wait": inserts_wait,
    }
    calls = {"take": welcomed.append, "note_silence": lambda: None, "note_end": lambda: welcomed.append(None)}
    connection.keep(SimpleNamespace(**facts, **calls))
    return welcomed


@pytest.fixture
def connection():
    connection = Connection("127.0.0.1", 9, None)  # Nobody listens there.
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Welcome(**WELCOME), ""),
        (Welcome(**{**WELCOME, "run_id": "8"}), "new_memory"),
        (Welcome(**{**WELCOME, "stream": 2}), "new_memory"),
        (Welcome(**{**WELCOME, "experience": 11}), "moved"),
        (Welcome(**{**WELCOME, "table": {"steps": {}}}), "declaration"),
        (Refusal(session=5, reason="stream_taken"), "stream_taken"),
        (Refusal(session=5, reason="unknown_lease"), ""),
        (Refusal(session=6, reason="stream_taken"), ""),
    ],
)
def test_a_lease_ends_by_a_refusal_or_the_welcome_of_another_lease(connection, answer, reason):
    welcomed, sent = keep_lease(connection), []
    connection._take(SimpleNamespace(send=sent.append), answer)
    assert connection._refused.get(5, ("", ""))[0] == reason
    assert welcomed == ([None] if reason else [answer] * isinstance(answer, Welcome))
    assert sent == [HELLO] * (getattr(answer, "reason", "") == "unknown_lease")
    if reason:
        with pytest.raises(UsageError) as refused:
            connection.check(5)
        assert refused.value.remedy


@pytest.mark.parametrize(("role", "length", "ends"), [("writer", 2, True), ("writer", 1, False), ("sampler", 2, False)])
def test_lower_segment_lengths_end_the_leases_of_writers(connection, role, length, ends):
    """The server would refuse longer segments, which are sent again until they are stored."""
    welcomed = keep_lease(connection, replace(HELLO, role=role), length)
    connection._take(None, Welcome(**WELCOME))
    assert welcomed == [None if ends else Welcome(**WELCOME)]
    if ends:
        with pytest.raises(UsageError, match="segment_length, 1") as refused:
            connection.check(5)
        assert refused.value.remedy


@pytest.mark.parametrize(
    ("role", "before", "ends"), [("writer", False, True), ("writer", True, False), ("sampler", False, False)]
)
def test_inserts_that_begin_to_wait_end_the_leases_of_writers(connection, role, before, ends):
    """The server of a queue would refuse segments of items that are far apart."""
    welcomed, welcome = keep_lease(connection, replace(HELLO, role=role), 1, before), Welcome(**WELCOME)
    connection._take(None, replace(welcome, limiter=(1, 0.0, 0.0, True)))
    assert (welcomed == [None]) == ends
    if ends:
        assert connection._refused[5] == ("inserts_wait", "")
        with pytest.raises(UsageError):
            connection.check(5)


def test_a_lease_that_a_server_does_not_know_is_asked_for_until_a_welcome(connection):
    welcomed, sent = keep_lease(connection), []
    socket = SimpleNamespace(send=sent.append)
    for answer in (None, Refusal(session=5, reason="unknown_lease"), None, Alive(session=5), Welcome(**WELCOME)):
        if answer is not None:
            connection._take(socket, answer)
        connection._beat(socket)
    assert sent == [Beat(session=5), HELLO, *[HELLO] * 3, Beat(session=5)]
    assert len(welcomed) == 1


@pytest.mark.parametrize(
    ("address", "named"),
    [
        (("a b", 1), "'a b'"),
        (("", 1), "''"),
        (("ü", 1), "ü"),
        (("-", 1), "-"),
        (("a..b", 1), "a..b"),
        (("a-", 1), "a-"),
        (("a" * 64, 1), "a" * 64),
        (("a." * 130, 1), "a.a."),
        (("h", "x"), "'x'"),
        (("h", 0), "0"),
        (("h", 65_536), "65536"),
    ],
)
def test_an_invalid_address_of_a_server_is_refused_at_once(address, named):
    with pytest.raises(UsageError) as refused:
        Client(*address)
    assert named in refused.value.problem


@pytest.mark.parametrize("timeout", ["x", None, -1.0, float("nan")])
def test_an_invalid_timeout_is_refused(timeout):
    with Client(port=9) as client, pytest.raises(UsageError, match="timeout"):
        client.status(timeout=timeout)


def test_a_connection_whose_thread_fails_says_why():
    connection = Connection("not a host", 9, None)
    with pytest.raises(UsageError, match=r"not a host:9 has failed: .*nvalid argument"):
        block(connection.ask(StatusRequest(session=5), 60.0))
    with pytest.raises(UsageError, match="has failed"):
        connection.check(5)
    connection.close()


def test_a_server_that_is_still_starting_is_not_called_absent(connection):
    later = SimpleNamespace(put=lambda request: connection._take(None, Later(session=5)), empty=lambda: True)
    connection._requests = later
    with pytest.raises(DataError) as raised:
        block(connection.ask(StatusRequest(session=5), 0.2))
    assert "firewall" not in raised.value.remedy


@pytest.mark.parametrize("table", ["x" * 201, "é", "a\nb", 5, None])
def test_a_table_that_cannot_have_this_name_is_refused_at_once(table):
    with Client(port=9) as client, pytest.raises(UsageError) as refused:  # Nobody listens there.
        client.writer(table, timeout=60.0)
    assert repr(table) in refused.value.problem
    assert not isinstance(refused.value, DataError)
