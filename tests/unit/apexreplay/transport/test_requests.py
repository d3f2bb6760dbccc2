"""Clients ask for batches by messages: credit, several samplers, and requests that nobody should send."""

import socket
from collections import Counter

import pytest
import zmq
from support.builders import PIXELS, RUN, VECTORS, make_batch
from support.waiting import DEADLINE, until

from apexreplay.errors import UsageError
from apexreplay.tables import table
from apexreplay.transport.endpoints import BatchRequester, RequestReceiver
from apexreplay.types import Stream
from apexreplay.wire.codec import MAX_PRIORITIES, Codec
from apexreplay.wire.header import MessageKind, pack

CODEC = Codec(RUN, PIXELS.table)


def endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def receive(receiver, count):
    """Returns `count` requests, and fails if there are more."""
    found = []
    until(lambda: found.extend(receiver.receive(0.1)) or len(found) >= count, "requests")
    assert len(found) == count
    assert receiver.receive(0.2) == []
    return found


def test_a_client_keeps_its_credit_and_gets_a_batch_for_each_request(context):
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC)
    requester = BatchRequester(context, [address], CODEC, batch_size=4, credit=3)
    requests = receive(receiver, 3)
    assert {size for _, size in requests} == {4}
    assert requester.receive(0.0) is None
    for number, (client, _) in enumerate(requests[:2]):
        receiver.answer(client, make_batch(PIXELS, number=number))
    assert [requester.receive(DEADLINE).number for _ in range(2)] == [0, 1]
    assert len(receive(receiver, 2)) == 2
    requester.reconnect()
    (client, _), *_ = receive(receiver, 3)

    def is_gone(peer):
        """The end of a connection, too, needs both sockets to be read."""
        assert requester.receive(0.0) is None
        assert receiver.receive(0.0) == []
        return not receiver.answer(peer, make_batch(PIXELS, number=8))

    for gone in (requests[2][0], b"nobody"):  # the first is the connection before
        until(lambda gone=gone: is_gone(gone), "end of a connection")
    assert receiver.answer(client, make_batch(PIXELS, number=9))
    assert requester.receive(DEADLINE).number == 9
    assert (receiver.refused, requester.refused) == ({"unanswered": 2}, {})


def test_requests_go_to_all_sampler_processes_in_turn(context):
    addresses = [endpoint(), endpoint()]
    receivers = [RequestReceiver(context, address, CODEC) for address in addresses]
    requester = BatchRequester(context, addresses, CODEC, batch_size=4, credit=4)
    for receiver in receivers:
        for client, _ in receive(receiver, 2):
            receiver.answer(client, make_batch(PIXELS))
    for _ in range(4):
        assert requester.receive(DEADLINE) is not None


@pytest.mark.parametrize(
    ("request_parts", "reason"),
    [
        ([b""], "length"),
        ([b"x" * 60], "magic"),
        ([*CODEC.encode_request(4), b""], "frames"),
        ([CODEC.encode_request(4)[0] + b"x"], "length"),
        (CODEC.encode_request(0), "count"),
        (CODEC.encode_request(MAX_PRIORITIES + 1), "count"),
        (Codec(RUN + 1, PIXELS.table).encode_request(4), "run"),
        (Codec(RUN, VECTORS.table).encode_request(4), "schema"),
        (CODEC.encode_batch(make_batch(PIXELS))[:1], "kind"),
        ([pack(MessageKind.REQUEST, 1, RUN, Stream(0, 0), PIXELS.table.fingerprint, 0, 4, [])], "shard"),
        ([pack(MessageKind.REQUEST, 0, RUN, Stream(0, 0), PIXELS.table.fingerprint, 0, 4, [b"x"]) + b"x"], "length"),
    ],
)
def test_a_wrong_request_is_counted_and_others_are_answered(context, request_parts, reason):
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    stranger.send_multipart(request_parts)
    stranger.send_multipart(CODEC.encode_request(4))
    ((client, size),) = receive(receiver, 1)
    assert (size, receiver.refused) == (4, {reason: 1})
    receiver.answer(client, make_batch(PIXELS))
    assert stranger.poll(DEADLINE * 1_000)


def test_batches_that_could_exceed_a_message_are_refused(context):
    address, codec = endpoint(), Codec(RUN, table("large", {"x": ("uint8", (100_000,))}))
    receiver = RequestReceiver(context, address, codec)
    with pytest.raises(UsageError) as refused:
        BatchRequester(context, [address], codec, batch_size=50_000, credit=1)
    assert "50000" in refused.value.problem
    assert refused.value.remedy
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    stranger.send_multipart(codec.encode_request(50_000))
    stranger.send_multipart(codec.encode_request(40_000))
    ((_, size),) = receive(receiver, 1)
    assert (size, receiver.refused) == (40_000, {"count": 1})


def test_a_wrong_batch_is_counted_and_asked_for_again(context):
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC)
    requester = BatchRequester(context, [address], CODEC, batch_size=4, credit=1)
    wrong = make_batch(PIXELS)
    wrong.records["probability"] = 2.0
    batches = [make_batch(PIXELS, count=5), make_batch(PIXELS)._replace(shard=1), wrong, make_batch(PIXELS, number=6)]
    for batch in batches:
        ((client, _),) = receive(receiver, 1)
        receiver.answer(client, batch)
        back = requester.receive(DEADLINE)
        assert (back is None) == (batch is not batches[-1])
    assert back.number == 6
    assert requester.refused == Counter(count=1, shard=1, probability=1)
