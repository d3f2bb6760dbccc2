"""Clients ask for batches by messages: credit, several samplers, and requests that nobody should send."""

import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from operator import sub

import pytest
import zmq
from support.builders import PIXELS, RUN, VECTORS, make_batch
from support.waiting import DEADLINE, until

from apexreplay.errors import UsageError
from apexreplay.tables import table
from apexreplay.transport.endpoints import MAX_BURST, BatchRequester, RequestReceiver, max_batch_bytes
from apexreplay.transport.socket_events import SocketEvents
from apexreplay.transport.sockets import open_context
from apexreplay.transport.timing import RENEW_SECONDS
from apexreplay.types import Stream
from apexreplay.wire.codec import MAX_PRIORITIES, Codec
from apexreplay.wire.header import MessageKind, pack

CODEC = Codec(RUN, PIXELS.table)


def endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def receive(receiver, count, *requesters):
    """Returns `count` requests, and fails if there are more. The requesters get no batch meanwhile."""
    found = []

    def arrived():
        found.extend(receiver.receive(0.05))
        assert [requester.receive(0.0) for requester in requesters] == [None] * len(requesters)  # Reads greetings.
        return len(found) >= count

    until(arrived, "requests")
    assert len(found) == count
    assert receiver.receive(0.2) == []
    return found


def make_requester(context, *addresses, codec=CODEC, credit=3, shard=0):
    return BatchRequester(context, addresses, codec, batch_size=4, credit=credit, shard=shard)


def test_a_client_keeps_its_credit_and_gets_a_batch_for_each_request(context):
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC)
    requester = make_requester(context, address)
    requests = receive(receiver, 3, requester)
    assert {size for _, size in requests} == {4}
    for number, (client, _) in enumerate(requests[:2]):
        assert receiver.answer(client, make_batch(PIXELS, number=number))
    assert [requester.receive(DEADLINE).number for _ in range(2)] == [0, 1]
    assert len(receive(receiver, 2)) == 2
    assert not receiver.answer(b"nobody", make_batch(PIXELS))
    assert receiver.refused == requester.refused == {}


def test_clients_share_a_sampler_process_and_get_only_what_they_asked_for(context):
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC, shard=2)
    requesters = [make_requester(context, address, shard=2) for _ in range(2)]
    requests = receive(receiver, 6, *requesters)
    assert sorted(Counter(client for client, _ in requests).values()) == [3, 3]
    for number, (client, _) in enumerate(requests):
        receiver.answer(client, make_batch(PIXELS, number=number)._replace(shard=2))
    for requester in requesters:
        found = {requester.receive(DEADLINE).number for _ in range(3)}
        (client,) = {requests[number][0] for number in found}
        assert requester.receive(0.0) is None
        requester.close()
        until(lambda gone=client: not receiver.answer(gone, make_batch(PIXELS)), "the end of the connection")


@pytest.mark.parametrize("linger", [0.0, DEADLINE])
def test_the_end_of_a_receiver_sends_the_rest_if_it_lingers(context, linger):
    """As when a server ends that has counted the items of a queue as given."""
    address, batch = endpoint(), make_batch(PIXELS)._replace(blob=bytes(20_000_000))
    client = context.socket(zmq.DEALER)
    client.rcvhwm = 1
    client.connect(address)

    ended = threading.Event()

    def count_slowly():
        ended.wait(0.3 if linger else DEADLINE)  # A receiver that lingers ends only when its batches are read.
        count = 0
        while count < 4 and client.poll(1_000 * (DEADLINE if linger else 1)):
            count += len(client.recv_multipart()[-1]) > 20_000_000 // 2
        return count

    with ThreadPoolExecutor(1) as thread:
        with open_context() as own:
            receiver = RequestReceiver(own, address, CODEC, linger=linger)
            for _ in range(4):
                client.send_multipart(CODEC.encode_request(4))
            for name, _ in receive(receiver, 4):
                assert receiver.answer(name, batch)
            arrived = thread.submit(count_slowly)
        ended.set()
        assert (arrived.result(DEADLINE) == 4) == bool(linger)


def test_one_call_handles_few_messages(context):
    """A client that sends without end must not keep the caller."""
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    for _ in range(10 * MAX_BURST):
        stranger.send(b"")
    time.sleep(0.3)  # Most messages arrive.
    counts = [0]

    def handled():
        assert receiver.receive(0.05) == []
        counts.append(receiver.num_refused)
        return counts[-1] == 10 * MAX_BURST

    until(handled, "all messages")
    assert max(map(sub, counts[1:], counts)) <= MAX_BURST


def test_a_client_that_has_waited_for_long_renews_its_connection(context):
    """Also if it waits by other means than `receive`."""
    address = endpoint()
    receiver, requester = RequestReceiver(context, address, CODEC), make_requester(context, address)
    lost = {client for client, _ in receive(receiver, 3, requester)}
    assert requester.receive(0.0, waited=RENEW_SECONDS) is None
    renewed = {client for client, _ in receive(receiver, 3, requester)}
    assert len(lost) == len(renewed) == 1
    assert lost != renewed


def test_requests_go_to_all_sampler_processes_that_can_be_reached(context):
    addresses = [endpoint(), endpoint()]
    receivers = [RequestReceiver(context, address, CODEC) for address in addresses]
    requester = make_requester(context, *addresses, "tcp://127.0.0.1:1", credit=1)
    for number in range(6):
        receiver, client = until(
            lambda: next(
                (
                    (each, client)
                    for each in receivers
                    for client, _ in each.receive(0.05) or requester.receive(0.0) or []
                ),
                None,
            ),
            "a request",
        )
        receiver.answer(client, make_batch(PIXELS, number=number))
        assert requester.receive(DEADLINE).number == number


def test_a_client_asks_again_when_the_server_has_started_again(context):
    """Of several sampler processes, batches that it has not read are lost; still, its credit stays the same."""
    address = endpoint()
    requester = make_requester(context, address, "tcp://127.0.0.1:1")
    for _ in range(3):
        with open_context() as server:
            receiver = RequestReceiver(server, address, CODEC)
            requests = receive(receiver, 3, requester)
            assert receiver.answer(requests[0][0], make_batch(PIXELS, number=1))
            assert requester.receive(DEADLINE).number == 1
            for client, _ in [*requests[1:], *receive(receiver, 1)]:
                assert receiver.answer(client, make_batch(PIXELS))


@pytest.mark.parametrize("is_up", [False, True], ids=["reads before the next start", "reads after it"])
def test_batches_that_have_arrived_outlive_their_connection(context, is_up):
    """A queue does not give them again. They are followed by no request, because the greeting asks for all."""
    address = endpoint()
    requester = make_requester(context, address)
    numbers, unread = [], 0
    for start in range(4):
        with open_context() as server:
            receiver, requests = RequestReceiver(server, address, CODEC, linger=DEADLINE), []

            def arrived(receiver=receiver, requests=requests, unread=unread):
                requests.extend(receiver.receive(0.05))
                batch = requester.receive(0.0)
                numbers.extend([] if batch is None else [batch.number])
                return len(requests) >= 3 and len(numbers) >= unread

            until(arrived, "requests")
            assert receiver.receive(0.2) == []
            assert len(requests) == 3
            for number, (client, _) in enumerate(requests, 3 * start):
                assert receiver.answer(client, make_batch(PIXELS, number=number))
            unread = 3 * start + 3
        until(lambda: requester._breaks._events.poll(10), "end of the connection")
        while not is_up and len(numbers) < unread:
            numbers.append(requester.receive(DEADLINE).number)
    assert numbers == list(range(9 if is_up else 12))


def test_starts_of_the_server_while_a_client_is_busy_add_no_credit(context):
    """It then reads several greetings at once."""
    address = endpoint()
    requester = make_requester(context, address)
    for _ in range(2):
        with open_context() as server:
            router = server.socket(zmq.ROUTER)
            router.linger, router.probe_router = int(1_000 * DEADLINE), 1
            connections = SocketEvents(router, zmq.EVENT_HANDSHAKE_SUCCEEDED)
            router.bind(address)
            until(connections.read, "connection")
            router.poll(100)  # sends the greeting
    breaks, read = [], requester._breaks.read
    until(lambda: breaks.extend(read()) or len(breaks) == 2, "ends of the connections")
    requester._breaks.read = lambda: [breaks.pop() for _ in list(breaks)] + read()
    receive(RequestReceiver(context, address, CODEC), 3, requester)


def test_a_long_silence_renews_the_connection(context, monkeypatch):
    monkeypatch.setattr("apexreplay.transport.timing.RENEW_SECONDS", 0.2)
    address = endpoint()
    receiver = RequestReceiver(context, address, CODEC)
    requester = make_requester(context, address)
    old = receive(receiver, 3, requester)
    requester.receive(0.2)
    new = receive(receiver, 3, requester)

    def is_gone():
        """The end of a connection, too, needs both sockets to be read."""
        assert requester.receive(0.0) is None
        assert receiver.receive(0.0) == []
        return not receiver.answer(old[0][0], make_batch(PIXELS, number=1))

    until(is_gone, "the end of the old connection")
    for number in (2, 3):
        assert receiver.answer(new[0][0], make_batch(PIXELS, number=number))
        assert requester.receive(DEADLINE).number == number
        assert len(receive(receiver, 1, requester)) == 1


def test_a_large_batch_may_take_longer_before_the_connection_is_renewed(context):
    address, limit = endpoint(), max_batch_bytes(PIXELS.table, 4)
    receiver = RequestReceiver(context, address, CODEC)
    requester = BatchRequester(context, [address], CODEC, batch_size=4, credit=3, slowest=limit / 5)
    receive(receiver, 3, requester)
    requester.receive(0.0, waited=RENEW_SECONDS + 4.9)
    assert receiver.receive(0.3) == []
    requester.receive(0.0, waited=0.2)
    receive(receiver, 3, requester)


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
        (CODEC.encode_request(4, shard=1), "shard"),
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
    requester = make_requester(context, address, credit=1)
    wrong = make_batch(PIXELS)
    wrong.records["probability"] = 2.0
    batches = [make_batch(PIXELS, count=5), make_batch(PIXELS)._replace(shard=1), wrong, make_batch(PIXELS, number=6)]
    for batch in batches:
        ((client, _),) = receive(receiver, 1, *([requester] if batch is batches[0] else []))
        receiver.answer(client, batch)
        back = requester.receive(DEADLINE)
        assert (back is None) == (batch is not batches[-1])
    assert back.number == 6
    assert requester.refused == Counter(count=1, shard=1, probability=1)
