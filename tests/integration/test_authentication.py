"""Who gets in where there are keys, on real sockets: the key of the right role, and nobody else."""

from __future__ import annotations

import asyncio
import socket as network
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import zmq
from support.builders import PIXELS, RUN, VALUES, make_segment
from support.waiting import DEADLINE, until
from zmq.utils.monitor import recv_monitor_message

from apex.config import Config, TransportConfig, to_dict
from apex.errors import UsageError
from apex.learning.parameter_publisher import PublishingThread
from apex.runtime.lifecycle import Stop
from apex.transport.async_receiver import PULL, ROUTER, AsyncReceiver
from apex.transport.codec import Codec
from apex.transport.control_client import ControlClient
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import ENDPOINTS, Keys
from apex.transport.curve.zap_handler import ZapHandlerError
from apex.transport.endpoints import BatchReceiver, ExperienceSender, ParameterPublisher, ParameterSubscriber
from apex.transport.hello import Route, greet
from apex.transport.json_codec import decode_request, encode_control
from apex.transport.messages.control import StatusRequest, WelcomeAnswer
from apex.transport.sockets import InsecureBindWarning, bind, connect, open_context, prepare
from apex.types import Parameters

CODEC = Codec(RUN, PIXELS)
ANY_PORT = "tcp://127.0.0.1:*"
OUTCOMES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@pytest.fixture
def folder(tmp_path):
    new_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def elsewhere(tmp_path):
    """Keys of another cluster."""
    new_folder(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


class Server:
    """A bound socket, and what comes of those who connect."""

    def __init__(self, context, socket_name, kind=zmq.PULL):
        self.context = context
        self.socket = context.socket(kind)
        prepare(self.socket, high_water_mark=10)
        self._monitor = self.socket.get_monitor_socket(OUTCOMES)
        bind(self.socket, ANY_PORT, socket_name)
        self.endpoint = self.socket.last_endpoint.decode()

    def outcome(self):
        """Of the next handshake."""
        assert self._monitor.poll(DEADLINE * 1000), "nobody came"
        return zmq.Event(recv_monitor_message(self._monitor)["event"]).name.removeprefix("HANDSHAKE_")

    def received(self, seconds=DEADLINE):
        return self.socket.recv() if self.socket.poll(seconds * 1000) else None


@contextmanager
def open_server(keys, socket_name="experience"):
    with open_context(keys) as context:
        yield Server(context, socket_name)


@contextmanager
def knock(keys, server, socket_name="experience"):
    """A client that has a message for the server."""
    with open_context(keys) as context:
        client = context.socket(zmq.PUSH)
        prepare(client, high_water_mark=10)
        connect(client, server.endpoint, socket_name)
        client.send(b"knock", zmq.NOBLOCK)
        yield client


def mixed(folder, other, role):
    """A folder with the public lists of one and the secret of another."""
    for path in folder.glob("*.key"):
        (other / path.name).write_text(path.read_text())
    return Keys(other, role)


@pytest.mark.parametrize("socket_name", ENDPOINTS)
def test_the_key_of_a_role_opens_the_sockets_of_that_role_and_no_others(folder, socket_name):
    with open_server(Keys(folder, ENDPOINTS[socket_name].bound_by), socket_name) as server:
        for role in ENDPOINTS[socket_name].open_to:
            with knock(Keys(folder, role), server, socket_name):
                assert server.outcome() == "SUCCEEDED"
                assert server.received() == b"knock"
        for role in {"actor", "evaluator", "observer", "replay", "learner"} - set(ENDPOINTS[socket_name].open_to):
            with knock(Keys(folder, role), server, socket_name):
                assert server.outcome() == "FAILED_AUTH"
            assert server.received(0.05) is None
            assert server.context.refused_connections[f"{socket_name}: key of the role {role}"] >= 1


def test_a_wrong_key_is_refused(folder, elsewhere):
    with (
        open_server(Keys(folder, "replay")) as server,
        knock(mixed(folder, elsewhere, "actor"), server),
    ):
        assert server.outcome() == "FAILED_AUTH"
        assert server.received(0.2) is None
        assert set(server.context.refused_connections) == {"experience: unknown key"}


def test_no_key_is_refused(folder):
    """A client that speaks ZeroMQ's NULL mechanism."""
    with open_server(Keys(folder, "replay")) as server, knock(None, server):
        assert server.outcome() != "SUCCEEDED"  # How it fails depends on who hangs up first.
        assert server.received(0.2) is None


def test_another_roles_key_is_refused(folder):
    with open_server(Keys(folder, "replay")) as server, knock(Keys(folder, "evaluator"), server):
        assert server.outcome() == "FAILED_AUTH"
        assert server.received(0.2) is None
        assert set(server.context.refused_connections) == {"experience: key of the role evaluator"}


def test_a_revoked_key_is_refused_and_its_open_connection_cut_while_others_come_again(folder):
    new_folder(folder / "second")
    (folder / "actor.second.key").write_text((folder / "second" / "actor.key").read_text())
    second = mixed(folder, folder / "second", "actor")
    with (
        open_server(Keys(folder, "replay")) as server,
        knock(Keys(folder, "actor"), server) as first,
        knock(second, server) as other,
    ):
        assert [server.outcome(), server.outcome()] == ["SUCCEEDED", "SUCCEEDED"]
        assert [server.received(), server.received()] == [b"knock", b"knock"]
        (folder / "actor.key").unlink()
        assert sorted([server.outcome(), server.outcome()]) == ["FAILED_AUTH", "SUCCEEDED"]
        first.send(b"first", zmq.NOBLOCK)
        other.send(b"other", zmq.NOBLOCK)
        assert server.received() == b"other"
        assert server.received(0.2) is None
        assert server.context.refused_connections["experience: removed key"] >= 1


class Cursed(Keys):
    """Kills the authenticator that looks at them."""

    cursed = False
    num_looks = 0

    def accepted(self, role):
        self.num_looks += role == "actor"
        if self.cursed:
            raise RuntimeError("cursed")
        return super().accepted(role)


def test_a_role_whose_authenticator_died_ends(folder):
    keys, stop = Cursed(folder, "learner"), Stop()
    publishing = PublishingThread(free_endpoint(), CODEC, stop, keys)
    until(lambda: keys.num_looks > 2, "an authenticator at work")
    keys.cursed = True
    until(lambda: stop.poll(), "request to stop")
    with pytest.raises(ZapHandlerError, match="cursed"):
        publishing.check()


def test_a_dead_authenticator_lets_nobody_in_and_its_role_hears_of_it(folder):
    keys = Cursed(folder, "replay")
    with open_server(keys) as server:
        keys.cursed = True

        def dead():
            try:
                server.context.check()
            except ZapHandlerError as error:
                return error

        assert "cursed" in str(until(dead, "death"))
        with knock(Keys(folder, "actor"), server):
            assert server.outcome() != "SUCCEEDED"
            assert server.received(0.2) is None


def test_a_key_that_is_moved_to_another_role_loses_what_it_was(folder):
    with (
        open_server(Keys(folder, "learner"), "parameters") as server,
        knock(Keys(folder, "actor"), server, "parameters") as client,
    ):
        assert server.socket.recv(copy=False).get("User-Id") == "actor"
        (folder / "actor.key").rename(folder / "evaluator.second.key")
        assert [server.outcome(), server.outcome()] == ["SUCCEEDED", "SUCCEEDED"]
        client.send(b"again", zmq.NOBLOCK)
        assert server.socket.poll(DEADLINE * 1000)
        assert server.socket.recv(copy=False).get("User-Id") == "evaluator"


def test_a_key_that_is_added_gets_in_without_a_restart(folder, elsewhere):
    added = (elsewhere / "actor.key").read_text()
    keys = mixed(folder, elsewhere, "actor")
    with open_server(Keys(folder, "replay")) as server, knock(keys, server):
        assert server.outcome() == "FAILED_AUTH"
        (folder / "actor.since-today.key").write_text(added)
        until(lambda: server.outcome() == "SUCCEEDED", "success")
        assert server.received() == b"knock"


@pytest.mark.parametrize("spoil", ["nonsense", "open to all"])
def test_a_public_key_that_cannot_be_trusted_lets_nobody_in(folder, spoil, caplog):
    public, actor = folder / "actor.key", Keys(folder, "actor")
    with open_server(Keys(folder, "replay")) as server:
        {
            "nonsense": lambda: public.write_text("x" * 64),
            "open to all": lambda: public.chmod(0o666),
        }[spoil]()

        def refused():
            with knock(actor, server):
                return server.outcome() == "FAILED_AUTH"

        until(refused, "refusal")
        assert "refusing all peers of the role actor" in caplog.text


def test_a_client_talks_to_nobody_but_the_pinned_server(folder, elsewhere):
    """A stranger who took the replay server's address, and lets everybody in, learns nothing."""
    with (
        open_server(Keys(elsewhere, "replay")) as stranger,
        knock(Keys(folder, "actor"), stranger),
    ):
        assert stranger.outcome() != "SUCCEEDED"
        assert stranger.received(0.2) is None


def old_protocol(endpoint):
    """Speaks ZMTP 2.0, which knows no mechanism: a PUSH socket that sends one message."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    connection = network.create_connection((host, int(port)), DEADLINE)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x01\x08" + b"\x00\x00" + b"\x00\x05knock")
    return connection


def test_the_protocol_from_before_authentication_gets_in_only_where_there_are_no_keys(folder):
    with open_server(None) as server, old_protocol(server.endpoint):
        assert server.received() == b"knock"
    with open_server(Keys(folder, "replay")) as server, old_protocol(server.endpoint) as connection:
        with suppress(ConnectionResetError):
            while connection.recv(100):  # Until it hangs up.
                pass
        assert server.received(0.2) is None


def test_only_who_binds_a_door_by_the_matrix_may_bind_it(folder):
    with open_context(Keys(folder, "actor")) as context, pytest.raises(UsageError, match="actor does not bind"):
        bind(context.socket(zmq.PULL), ANY_PORT, "experience")


def test_the_ends_of_all_kinds_work_with_keys_at_their_limits(folder):
    """What CURVE adds to a message, and its handshake, must not count against the limit of a message's size."""
    with open_context(Keys(folder, "learner")) as learner, open_context(Keys(folder, "evaluator")) as evaluator:
        endpoint = free_endpoint()
        publisher = ParameterPublisher(learner, endpoint, CODEC)
        publisher.publish(Parameters(3, VALUES))
        subscriber = ParameterSubscriber(evaluator, endpoint, CODEC, num_parameters=len(VALUES))

        def receive():
            publisher.serve(0.05)
            return subscriber.receive(0.0)

        assert until(receive, "parameters").version == 3


def free_endpoint():
    with network.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_who_asks_is_known_by_the_role_of_its_key(folder):
    async def scenario():
        with open_context(Keys(folder, "learner")) as learner, open_context(Keys(folder, "observer")) as observer:
            endpoint = free_endpoint()
            control = AsyncReceiver(learner, ROUTER, endpoint, "control", high_water_mark=10, max_bytes=1_000)
            client = ControlClient(observer, endpoint)
            client.send(StatusRequest())
            ((peer, *frames),) = await control.burst(DEADLINE)
            assert decode_request(frames, RUN) == StatusRequest()
            assert peer.role == "observer"
            control.reply(peer, [b"x"])
            assert client.receive(DEADLINE) is None
            assert client.refused == {"length": 1}

    asyncio.run(scenario())


def test_segments_arrive_whole_with_keys(folder):
    async def scenario():
        with open_context(Keys(folder, "replay")) as replay, open_context(Keys(folder, "actor")) as actor:
            endpoint, message = free_endpoint(), CODEC.encode_segment(make_segment(PIXELS))
            limit = max(map(len, message))
            receiver = AsyncReceiver(replay, PULL, endpoint, "experience", high_water_mark=10, max_bytes=limit)
            assert ExperienceSender(actor, endpoint, num_messages=1).send(message)
            ((frame,),) = await receiver.burst(DEADLINE)
            assert bytes(frame) == b"".join(message)

    asyncio.run(scenario())


def test_a_learner_without_keys_talks_nobody_into_opening_a_port():
    """It is bound beyond its host; who joins must have typed --insecure-no-auth too."""
    config = Config(transport=TransportConfig(bind="10.0.0.1", insecure_no_auth=True))
    welcome = WelcomeAnswer(
        run_id=RUN, config=to_dict(config), schema=PIXELS, num_parameters=10, num_actors=4, memory="", replay=[],
        absent="", streams=[],
    )  # fmt: skip

    async def scenario(route):
        with open_context() as context:
            control = AsyncReceiver(context, ROUTER, route.endpoint, "control", high_water_mark=10, max_bytes=1_000)
            joining = asyncio.create_task(asyncio.to_thread(greet, route, "replay", Stop()))
            ((peer, *_), *_) = await control.burst(DEADLINE)
            control.reply(peer, encode_control(welcome))
            return await joining

    port = int(free_endpoint().rpartition(":")[2])
    with pytest.raises(UsageError, match=r"10\.0\.0\.1.*--insecure-no-auth"):
        asyncio.run(scenario(Route("127.0.0.1", port)))
    assert asyncio.run(scenario(Route("127.0.0.1", port, insecure_no_auth=True))).run_id == RUN


def test_open_doors_without_keys_are_warned_of_every_minute(caplog):
    now = [0.0]
    for transport, count in (
        (TransportConfig(bind="0.0.0.0", insecure_no_auth=True), 3),
        (TransportConfig(insecure_no_auth=True), 0),  # nobody beyond this host
        (TransportConfig(bind="0.0.0.0", keys="keys"), 0),
    ):
        caplog.clear()
        warning = InsecureBindWarning(transport, clock=lambda: now[0])
        for _ in range(121):
            warning.check()
            now[0] += 1.0
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["--insecure-no-auth"] * count


def test_a_sampler_that_has_connected_and_is_silent_keeps_nobody_waiting(folder):
    """At the first ping of a connection with a key, the library says that something has arrived."""
    endpoint, connected, told = free_endpoint(), threading.Event(), threading.Event()

    def connect_and_speak_late():
        with open_context(Keys(folder, "replay")) as context:
            client = context.socket(zmq.PUSH)
            prepare(client, high_water_mark=10, linger=1.0)
            client.heartbeat_ivl = 500  # ours have none, a stranger's may
            monitor = client.get_monitor_socket(OUTCOMES)
            connect(client, endpoint, "batches")
            if monitor.poll(DEADLINE * 1000):
                connected.set()
            if not told.wait(DEADLINE):
                client.send(b"at last")

    with open_context(Keys(folder, "learner")) as context:
        receiver = BatchReceiver(context, endpoint, CODEC, batch_size=4, max_bytes=1_000)
        sampler = threading.Thread(target=connect_and_speak_late)
        sampler.start()
        assert connected.wait(DEADLINE)
        until_pinged = time.monotonic() + 1.5
        while time.monotonic() < until_pinged:
            assert receiver.receive(0.1) is None
        told.set()
        sampler.join()
        assert receiver.receive(0.0) is None
        assert receiver.refused == {}  # It would have waited for these words.
