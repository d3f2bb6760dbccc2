"""Sockets deliver messages, respect timeouts, and count invalid messages."""

import asyncio
import socket
import threading
import time

import numpy as np
import pytest
import zmq
from support.builders import CONTINUOUS, MASKED, PIXELS, RUN, VALUES, VECTORS, make_batch, make_receipts, make_segment
from support.messages import HELLO
from support.waiting import DEADLINE, until

from apex.config import TransportConfig
from apex.transport.endpoints import ParameterPublisher, ParameterSubscriber
from apex.transport.hello import split_address
from apex.transport.messages.control import StateAnswer, decode_answer, decode_request
from apex.transport.run_codec import RunCodec
from apex.types import Parameters
from apexreplay.errors import AddressError, UsageError
from apexreplay.frame_blob import make_blob
from apexreplay.transport.async_receiver import AsyncReceiver
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.endpoints import (
    CONTROL_MARGIN,
    ExperienceSender,
    PrioritySender,
    ReceiptPublisher,
    ReceiptReceiver,
    RequestReceiver,
    max_batch_bytes,
    max_segment_bytes,
)
from apexreplay.transport.sockets import REFUSABLE_BYTES, bind, open_context, prepare, reachable_address
from apexreplay.types import PriorityUpdate, Receipt, Stream
from apexreplay.wire.json_codec import encode_control

CODEC = RunCodec(RUN, PIXELS)


@pytest.fixture
def endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_size_limits_are_just_above_the_longest_messages(schema):
    """The messages have as many frames as possible (episodes of one step), and no frame compresses."""
    count, length = 64, 3_000
    num_steps, num_frames = length + schema.n_step, schema.stack + schema.n_step
    batch = make_batch(schema, count)
    batch = batch._replace(blob=make_blob([bytes(schema.table.max_entry_bytes)] * (count * num_frames)))
    segment = make_segment(schema, count=num_steps)
    segment = segment._replace(blob=make_blob([bytes(schema.table.max_entry_bytes)] * (2 * num_steps + schema.stack)))
    codec = RunCodec(RUN, schema)
    for message, limit in (
        (codec.encode_batch(batch), max_batch_bytes(schema.table, count)),
        (codec.encode_segment(segment), max_segment_bytes(schema.table, length)),
    ):
        assert 0 <= limit - sum(map(len, message)) < CONTROL_MARGIN


def test_messages_up_to_a_limit_are_refused_and_longer_ones_do_not_arrive(context, endpoint):
    receiver = RequestReceiver(context, endpoint, CODEC)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    stranger.send_multipart([*CODEC.encode_request(4), b"x" * REFUSABLE_BYTES])
    until(lambda: receiver.receive(0.05) or receiver.refused, "refusal")
    assert receiver.refused == {"frames": 1}
    receiver.refused.clear()
    stranger.send_multipart([*CODEC.encode_request(4), b"x" * (REFUSABLE_BYTES + 1)])
    assert receiver.receive(0.3) == []
    assert receiver.refused == {}


def test_a_new_subscriber_receives_the_newest_parameters(context, endpoint):
    publisher = ParameterPublisher(context, endpoint, CODEC, repeat_seconds=1_000.0)
    for version in (1, 2):
        publisher.publish(Parameters(version, VALUES))
    subscriber = ParameterSubscriber(context, endpoint, CODEC, num_parameters=10)

    def receive():
        publisher.serve(0.05)
        return subscriber.receive(0.0)

    newest = until(receive, "parameters")
    assert newest.version == 2
    np.testing.assert_array_equal(newest.values, VALUES)
    assert subscriber.receive(0.0) is None


def test_a_slow_subscriber_skips_versions_but_receives_the_newest(context, endpoint):
    publisher = ParameterPublisher(context, endpoint, CODEC, repeat_seconds=0.1)
    subscriber = ParameterSubscriber(context, endpoint, CODEC, num_parameters=10)
    publisher.publish(Parameters(0, VALUES))
    versions = []

    def reached(version):
        publisher.serve(0.02)
        news = subscriber.receive(0.0)
        versions.extend([news.version] if news else [])
        return versions and versions[-1] == version

    until(lambda: reached(0), "first parameters")
    for version in range(1, 100):  # More than the high-water mark: the newest may be dropped, and is sent again.
        publisher.publish(Parameters(version, VALUES))
    until(lambda: reached(99), "newest")
    assert len(versions) < 50
    assert publisher.num_bytes > 0


def test_subscribers_get_the_format_that_they_want(context, endpoint):
    publisher = ParameterPublisher(context, endpoint, CODEC, repeat_seconds=1_000.0)
    values = np.full(10, 1 + 2**-10, np.float32)
    publisher.publish(Parameters(3, values))
    whole, half = (
        ParameterSubscriber(context, endpoint, CODEC, num_parameters=10, bfloat16=bfloat16)
        for bfloat16 in (False, True)
    )
    for subscriber, expected in ((whole, 1 + 2**-10), (half, 1.0)):
        news = until(lambda subscriber=subscriber: publisher.serve(0.05) or subscriber.receive(0.0), "parameters")
        assert (news.version, set(news.values.tolist())) == (3, {expected})


def test_the_budget_of_all_subscribers_sets_the_period(context, endpoint):
    publisher = ParameterPublisher(context, endpoint, CODEC, repeat_seconds=1_000.0, bytes_per_second=92.0)
    publisher.publish(Parameters(1, VALUES))
    assert publisher.period == 0.0
    with open_context() as hosts:
        first, second = (ParameterSubscriber(hosts, endpoint, CODEC, num_parameters=10) for _ in range(2))
        until(lambda: publisher.serve(0.05) or publisher.period == 2.0, "subscriptions")  # Two messages of 92 bytes.
        publisher.publish(Parameters(2, VALUES))
        publisher.flush()
        assert {until(lambda each=each: each.receive(0.1), "version 2").version for each in (first, second)} <= {1, 2}
        publisher.publish(Parameters(3, VALUES))
        received = [first.receive(0.1) for _ in range(5)]  # The budget is used up.
        assert 3 not in [news.version for news in received if news]
        until(lambda: publisher.serve(0.05) or ((news := first.receive(0.0)) and news.version == 3), "version 3")
    until(lambda: publisher.serve(0.05) or publisher.period == 0.0, "end of the subscriptions")


def test_parameters_of_another_size_are_refused(context, endpoint):
    publisher = ParameterPublisher(context, endpoint, CODEC, repeat_seconds=1_000.0)
    publisher.publish(Parameters(1, VALUES[:5]))
    subscriber = ParameterSubscriber(context, endpoint, CODEC, num_parameters=10)

    def refused():
        publisher.serve(0.05)
        assert subscriber.receive(0.0) is None
        return subscriber.refused

    assert until(refused, "refusal") == {"count": 1}


def test_receipts_reach_only_the_actor_of_their_group(endpoint):
    receipts_endpoint = endpoint.rsplit(":", 1)[0] + ":" + str(int(endpoint.rsplit(":", 1)[1]) % 60_000 + 1_024)
    segment = make_segment(PIXELS, actor_id=2)

    async def scenario():
        with open_context() as server, open_context() as actor:
            limit = max_segment_bytes(PIXELS.table, 5)
            experience = AsyncReceiver(server, zmq.PULL, endpoint, "experience", high_water_mark=10, max_bytes=limit)
            publisher = ReceiptPublisher(server, receipts_endpoint, CODEC)
            sender = ExperienceSender(actor, endpoint, num_messages=4)
            own = ReceiptReceiver(actor, [receipts_endpoint], CODEC, [Stream(2, 7)])
            other = ReceiptReceiver(actor, [receipts_endpoint], CODEC, [Stream(3, 7)])
            assert sender.send(CODEC.encode_segment(segment))
            messages = await experience.burst(DEADLINE)
            back = CODEC.decode_segment(messages[0])
            assert back.stream == segment.stream
            receipt = Receipt(back.stream, 1, 4, 0)
            received = []
            deadline = time.monotonic() + DEADLINE
            while not received and time.monotonic() < deadline:
                publisher.publish(make_receipts(receipt, group=2))
                received = own.receive(0.05)
            assert received[0] == receipt
            assert other.receive() == []
            assert await experience.burst(0.0) == []

    asyncio.run(scenario())


def test_a_burst_waits_for_a_message_and_respects_its_limit(endpoint):
    async def scenario():
        with open_context() as server, open_context() as actor:
            experience = AsyncReceiver(server, zmq.PULL, endpoint, "experience", high_water_mark=10, max_bytes=100)
            waiting = asyncio.create_task(experience.burst(DEADLINE))
            await asyncio.sleep(0)
            sender = actor.socket(zmq.PUSH)
            monitor = sender.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            sender.connect(endpoint)
            deadline = time.monotonic() + DEADLINE
            while not monitor.poll(0) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert not waiting.done()
            for number in range(5):
                sender.send(bytes([number]))
            received = [bytes(frame) for (frame,) in await waiting]
            while len(received) < 5 and time.monotonic() < deadline:
                burst = await experience.burst(DEADLINE, limit=2)
                assert 1 <= len(burst) <= 2
                received += [bytes(frame) for (frame,) in burst]
            assert received == [bytes([number]) for number in range(5)]

    asyncio.run(scenario())


def test_a_receiver_gets_receipts_from_the_shard_of_each_stream(endpoint):
    host, port = endpoint.rsplit(":", 1)
    endpoints = [f"{host}:{int(port) % 60_000 + 3_072 + shard}" for shard in range(2)]

    async def scenario():
        with open_context() as server, open_context() as actor:
            publishers = [ReceiptPublisher(server, endpoint, CODEC) for endpoint in endpoints]
            receiver = ReceiptReceiver(actor, endpoints, CODEC, [Stream(3, 7), Stream(2, 7)])
            received = set()
            deadline = time.monotonic() + DEADLINE
            while len(received) < 2 and time.monotonic() < deadline:
                for shard, publisher in enumerate(publishers):
                    for group, actor_id in ((2, 2 + shard), (4, 4 + shard)):  # The group 4 is another actor's.
                        receipt = Receipt(Stream(actor_id, 7), 1, 10 * shard + actor_id, 0)
                        publisher.publish(make_receipts(receipt, group=group), shard)
                await asyncio.sleep(0)
                received |= {(receipt.stream.actor_id, receipt.contiguous) for receipt in receiver.receive(0.05)}
            assert received == {(2, 2), (3, 13)}

    asyncio.run(scenario())


def test_sending_experience_without_a_server_fails_when_the_queue_is_full(context, endpoint):
    sender = ExperienceSender(context, endpoint, num_messages=2)
    message = CODEC.encode_segment(make_segment(PIXELS))
    assert not all(sender.send(message) for _ in range(100))


def test_control_answers_arrive_and_invalid_ones_are_counted(endpoint, caplog):
    async def scenario():
        with open_context() as server, open_context() as role:
            control = AsyncReceiver(server, zmq.ROUTER, endpoint, "control", high_water_mark=10, max_bytes=1_000)
            client = ControlSocket(role, endpoint, decode_answer)
            client.send(HELLO)
            ((identity, *frames),) = await control.burst(DEADLINE)
            assert decode_request(frames, RUN) == HELLO
            control.reply(identity, encode_control(StateAnswer(True)))
            assert client.receive(DEADLINE) == StateAnswer(True)
            control.reply(identity, [b"nonsense"])
            control.reply(identity, [b"nonsense"])
            assert client.receive(DEADLINE) is None
            assert client.receive(DEADLINE) is None
            assert client.refused == {"length": 2}
            (warning,) = [record.getMessage() for record in caplog.records]
            assert endpoint in warning
            assert "length" in warning
            control.reply(b"nobody", encode_control(StateAnswer(True)))  # Does not raise.

    asyncio.run(scenario())


def test_sending_without_a_receiver_drops_messages_and_does_not_block(context, endpoint):
    client = ControlSocket(context, endpoint, decode_answer)
    for _ in range(100):
        client.send(HELLO)
    assert client.refused["dropped"] > 0
    priorities = PrioritySender(context, CODEC)
    priorities.connect(endpoint)
    for number in range(200):
        priorities.send(PriorityUpdate(0, 1, 0, number, np.arange(2), np.ones(2, np.float32)))
    assert priorities.num_dropped > 0


def test_priorities_follow_a_replay_server_to_its_new_address(context):
    receivers = []
    for _ in range(2):
        receiver = context.socket(zmq.PULL)
        prepare(receiver, high_water_mark=4)
        bind(receiver, "tcp://127.0.0.1:*", "priorities")
        receivers.append((receiver, receiver.last_endpoint.decode()))
    sender = PrioritySender(context, CODEC)
    for receiver, address in receivers:
        sender.connect(address)
        sender.send(PriorityUpdate(0, 1, 0, 7, np.arange(2), np.ones(2, np.float32)))
        assert receiver.poll(DEADLINE * 1000)
        assert CODEC.decode_priorities([receiver.recv()]).number == 7


def test_priorities_are_dropped_until_their_shard_is_connected(context):
    receivers = []
    sender = PrioritySender(context, CODEC)
    updates = [PriorityUpdate(shard, 1, 0, 7, np.arange(2), np.ones(2, np.float32)) for shard in range(2)]
    sender.send(updates[1])
    assert sender.num_dropped == 1
    for shard in range(2):
        receiver = context.socket(zmq.PULL)
        prepare(receiver, high_water_mark=4)
        bind(receiver, "tcp://127.0.0.1:*", "priorities")
        sender.connect(receiver.last_endpoint.decode(), shard)
        receivers.append(receiver)
    for update in updates[::-1]:
        sender.send(update)
    for shard, receiver in enumerate(receivers):
        assert receiver.poll(DEADLINE * 1000)
        assert CODEC.decode_priorities([receiver.recv()], shard).shard == shard
        assert not receiver.poll(50)


def test_binding_waits_for_a_port_to_be_released(context):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        timer = threading.Timer(0.5, holder.close)
        timer.start()
        receiver = context.socket(zmq.PULL)
        bind(receiver, f"tcp://127.0.0.1:{port}", "experience")
        assert receiver.last_endpoint == f"tcp://127.0.0.1:{port}".encode()
        timer.join()


def test_errors_name_the_address_that_cannot_be_bound(context, endpoint):
    bind(context.socket(zmq.PULL), endpoint, "batches")
    for address in (endpoint, "tcp://nowhere.invalid:5555"):
        with pytest.raises(AddressError) as error:
            bind(context.socket(zmq.PULL), address, "batches")
        assert address in str(error.value)


@pytest.mark.parametrize(
    ("bound", "reached"), [("127.0.0.3", "127.0.0.3"), ("localhost", "localhost"), ("0.0.0.0", "127.0.0.1")]
)
def test_a_bound_address_is_the_one_that_others_reach(bound, reached):
    transport = TransportConfig(bind=bound, insecure_no_auth=True)
    given = "" if transport.binds_to_all else bound
    assert reachable_address(given, "127.0.0.3") == reached  # The kernel sends from 127.0.0.1 to it.


def test_addresses_are_read_and_invalid_ones_refused():
    assert split_address("10.0.0.1", 22003) == ("10.0.0.1", 22003)
    assert split_address("learner:7", 22003) == ("learner", 7)
    for text in ("", ":5", "host:x", "host:0", "host:70000"):
        with pytest.raises(UsageError, match="--learner"):
            split_address(text, 22003)
