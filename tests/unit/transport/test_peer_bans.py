"""Who sends rubbish is ignored for a while, and nobody else."""

from __future__ import annotations

import asyncio
import time

import pytest
import zmq
from support.builders import PIXELS, RUN, make_segment

from apex.transport.async_receiver import AsyncReceiver
from apex.transport.codec import Codec
from apex.transport.header import WireError
from apex.transport.peer_bans import IGNORED_SECONDS, LOG_SECONDS, TOLERATED, PeerBans
from apex.transport.sockets import bind, open_context, prepare

DEADLINE = 10.0


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def context():
    with open_context() as made:
        yield made


class Scene:
    """A bound PULL, and who connects to it from this host."""

    def __init__(self, context):
        self._context = context
        self.socket = context.socket(zmq.PULL)
        prepare(self.socket, high_water_mark=1_000)
        bind(self.socket, "tcp://127.0.0.1:*", "experience")
        self.clock = Clock()
        self.peers = PeerBans(self.clock)

    def connect(self):
        sender = self._context.socket(zmq.PUSH)
        prepare(sender, high_water_mark=1_000, linger=1.0)
        sender.connect(self.socket.last_endpoint.decode())
        return sender

    def say(self, sender, *, rubbish=False):
        """Sends; returns whether it was listened to."""
        sender.send(b"x")
        assert self.socket.poll(1000 * DEADLINE)
        message = self.socket.recv_multipart(copy=False)
        heard = self.peers.hears(message)
        if heard and rubbish:
            self.peers.blame([frame.buffer for frame in message], "magic")
        return heard


def test_who_sends_rubbish_is_ignored_and_nobody_else_on_its_host(context, caplog):
    scene = Scene(context)
    liar, honest = scene.connect(), scene.connect()
    heard = [scene.say(liar, rubbish=True) for _ in range(TOLERATED + 5)]
    assert heard == [True] * (TOLERATED + 1) + [False] * 4
    assert scene.say(honest)
    assert scene.peers.num_ignored == 4
    assert scene.peers.forgive() == 1
    assert len(caplog.messages) == 1
    assert "ignores 127.0.0.1:" in caplog.messages[0]
    assert "refused for its magic" in caplog.messages[0]


def test_it_is_heard_again_after_a_while_and_has_less_credit_then(context):
    scene = Scene(context)
    liar = scene.connect()
    for _ in range(TOLERATED + 1):
        scene.say(liar, rubbish=True)
    scene.clock.now += IGNORED_SECONDS - 1
    assert not scene.say(liar)
    scene.clock.now += 2
    assert scene.say(liar)
    assert scene.peers.forgive() == 0


def test_now_and_then_a_mistake_is_no_reason(context):
    scene = Scene(context)
    clumsy = scene.connect()
    for _ in range(3 * TOLERATED):
        assert scene.say(clumsy, rubbish=True)
        scene.clock.now += 1.0


def test_a_connection_that_has_the_descriptor_of_one_that_was_ignored_is_heard(context):
    scene = Scene(context)
    liar = scene.connect()
    for _ in range(TOLERATED + 1):
        scene.say(liar, rubbish=True)
    assert not scene.say(liar)
    liar.close()
    for _ in range(50):  # Until one gets the descriptor, all are heard; and that one too.
        time.sleep(0.005)
        sender = scene.connect()
        assert scene.say(sender)
        sender.close()


def test_what_had_come_before_a_peer_was_ignored_is_no_new_reason(context, caplog):
    scene = Scene(context)
    liars = [scene.connect() for _ in range(3)]
    for liar in liars:
        came = []
        for _ in range(3 * TOLERATED):
            liar.send(b"x")
            assert scene.socket.poll(1000 * DEADLINE)
            came.append(scene.socket.recv_multipart(copy=False))
        for message in came:
            scene.peers.blame(message, "magic")
    assert scene.peers.forgive() == 3
    assert len(caplog.messages) == 1  # The others were too soon after it to be said.
    scene.clock.now += LOG_SECONDS
    last = scene.connect()
    for _ in range(TOLERATED + 1):
        scene.say(last, rubbish=True)
    assert "(and 2 others before)" in caplog.messages[1]


def test_what_came_by_no_connection_blames_nobody(context):
    peers = PeerBans()
    for _ in range(100):
        peers.blame([b"bytes"], "magic")
        peers.blame([], "frames")
        peers.blame([memoryview(b"x")], "magic")
    assert peers.forgive() == 0


def test_a_flood_of_rubbish_leaves_the_receiver_its_turns():
    codec = Codec(RUN, PIXELS)

    async def scenario():
        with open_context() as server, open_context() as others:
            receiver = AsyncReceiver(
                server, zmq.PULL, "tcp://127.0.0.1:*", "experience", high_water_mark=1_000, max_bytes=10_000
            )
            endpoint = receiver._socket.last_endpoint.decode()
            liar, honest = others.socket(zmq.PUSH), others.socket(zmq.PUSH)
            for socket in (liar, honest):
                prepare(socket, high_water_mark=2_000)
                socket.connect(endpoint)
            for _ in range(1_000):
                liar.send(b"rubbish")
            good = codec.encode_segment(make_segment(PIXELS))
            decoded, deadline = 0, time.monotonic() + DEADLINE
            while (
                decoded < 20 or receiver.peers.num_ignored < 1_000 - receiver.refused.get("length", 0)
            ) and time.monotonic() < deadline:
                if decoded < 20:
                    honest.send_multipart(good)
                for message in await receiver.burst(0.2):
                    try:
                        codec.decode_segment(message)
                        decoded += 1
                    except WireError as error:
                        receiver.blame(error, message)
            assert decoded >= 20
            assert receiver.refused["length"] <= TOLERATED + 64  # A burst was here already.
            assert receiver.peers.num_ignored == 1_000 - receiver.refused["length"]

    asyncio.run(scenario())
