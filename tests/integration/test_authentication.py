"""With keys, sockets accept only connections with a key of the right role."""

import asyncio
import errno
import socket as network
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import zmq
from support.builders import PIXELS, RUN, VALUES, make_segment
from support.waiting import DEADLINE, until
from zmq.utils.monitor import recv_monitor_message

from apex.config import Config, TransportConfig, to_dict
from apex.errors import RefusedError
from apex.learning.parameter_publisher import PublishingThread
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import ENDPOINTS, Keys
from apex.transport.endpoints import ParameterPublisher, ParameterSubscriber
from apex.transport.hello import Route, greet
from apex.transport.messages.control import StatusRequest, WelcomeAnswer, decode_answer, decode_request
from apex.transport.run_codec import RunCodec
from apex.types import Parameters
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.async_receiver import PULL, ROUTER, AsyncReceiver
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.curve.zap_handler import ZapHandlerError
from apexreplay.transport.endpoints import ExperienceSender, RequestReceiver
from apexreplay.transport.handshakes import NO_KEY, OTHER_SERVER, UNFINISHED
from apexreplay.transport.sockets import InsecureBindWarning, bind, connect, open_context, prepare
from apexreplay.wire.json_codec import encode_control

CODEC = RunCodec(RUN, PIXELS)
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
    """A bound socket, and the outcomes of connections to it."""

    def __init__(self, context, socket_name, kind=zmq.PULL):
        self.context = context
        self.socket = context.socket(kind)
        prepare(self.socket, high_water_mark=10)
        bind(self.socket, ANY_PORT, socket_name)
        self._monitor = self.socket.get_monitor_socket(OUTCOMES)  # The context does not count failures any more.
        self.endpoint = self.socket.last_endpoint.decode()

    def outcome(self):
        """Returns the outcome of the next handshake."""
        assert self._monitor.poll(DEADLINE * 1000), "no connection"
        return zmq.Event(recv_monitor_message(self._monitor)["event"]).name.removeprefix("HANDSHAKE_")

    def received(self, seconds=DEADLINE):
        return self.socket.recv() if self.socket.poll(seconds * 1000) else None


@contextmanager
def open_server(keys, socket_name="experience"):
    with open_context(keys) as context:
        yield Server(context, socket_name)


@contextmanager
def knock(keys, server, socket_name="experience"):
    """A client that sends a message to the server."""
    with open_context(keys) as context:
        client = context.socket(zmq.PUSH)
        prepare(client, high_water_mark=10)
        connect(client, server.endpoint, socket_name)
        client.send(b"knock", zmq.NOBLOCK)
        yield client


def mixed(folder, other, role):
    """Returns keys with the public keys of one folder and the secret of another."""
    for path in folder.glob("*.key"):
        (other / path.name).write_text(path.read_text())
    return Keys(other, role)


def is_counted(server, socket_name, role):
    return any(socket_name in reason and role in reason for reason in server.context.refused_connections)


@pytest.mark.parametrize("socket_name", ENDPOINTS)
def test_a_key_opens_only_the_sockets_of_its_role(folder, socket_name):
    with open_server(Keys(folder, ENDPOINTS[socket_name].bound_by), socket_name) as server:
        for role in ENDPOINTS[socket_name].open_to:
            with knock(Keys(folder, role), server, socket_name):
                assert server.outcome() == "SUCCEEDED"
                assert server.received() == b"knock"
        for role in {"actor", "evaluator", "observer", "replay", "learner"} - set(ENDPOINTS[socket_name].open_to):
            with knock(Keys(folder, role), server, socket_name):
                assert server.outcome() == "FAILED_AUTH"
                until(lambda role=role: is_counted(server, socket_name, role), "count of this role")
            assert server.received(0.05) is None


def test_an_unknown_key_is_refused(folder, elsewhere):
    with open_server(Keys(folder, "replay")) as server, knock(mixed(folder, elsewhere, "actor"), server):
        assert server.outcome() == "FAILED_AUTH"
        assert server.received(0.2) is None
        assert set(server.context.refused_connections) == {"experience: unknown key"}


def test_clients_without_a_key_are_refused(folder):
    """The client uses ZeroMQ's NULL mechanism."""
    with open_server(Keys(folder, "replay")) as server, knock(None, server):
        assert server.outcome() != "SUCCEEDED"  # The kind of failure depends on which side closes first.
        assert server.received(0.2) is None


@pytest.mark.parametrize("reason", [NO_KEY, OTHER_SERVER])
def test_a_connection_without_the_servers_key_is_counted(folder, elsewhere, reason):
    with open_context(Keys(folder, "replay")) as context:
        receiver = context.socket(zmq.PULL)
        prepare(receiver, high_water_mark=10)
        bind(receiver, ANY_PORT, "experience")
        server = SimpleNamespace(endpoint=receiver.last_endpoint.decode())
        with knock(Keys(elsewhere, "actor") if reason == OTHER_SERVER else None, server):
            until(lambda: context.refused_connections, "count")
        expected = {OTHER_SERVER} if reason == OTHER_SERVER else {NO_KEY, UNFINISHED}  # depends on which side is first
        assert set(context.refused_connections) <= {f"experience: {each}" for each in expected}
        assert not receiver.poll(200)


@pytest.mark.parametrize("keyed", ["learner", "program"])
def test_a_program_ends_if_only_one_side_has_keys(folder, keyed):
    endpoint = free_endpoint()
    route = Route("127.0.0.1", int(endpoint.rpartition(":")[2]), str(folder) if keyed == "program" else "")
    with open_context(Keys(folder, "learner") if keyed == "learner" else None) as context:
        AsyncReceiver(context, ROUTER, endpoint, "control", high_water_mark=10, max_bytes=1_000)
        with pytest.raises(RefusedError) as refused:
            greet(route, "actor", Stop())
    assert endpoint in refused.value.problem
    assert "--keys" in refused.value.remedy


def test_a_key_folder_that_is_moved_revokes_no_key(folder):
    class Watched(Keys):
        num_looks = 0

        @property
        def exist(self):
            self.num_looks += 1
            return super().exist

    keys = Watched(folder, "replay")
    with open_server(keys) as server, knock(Keys(folder, "actor"), server) as client:
        assert (server.outcome(), server.received()) == ("SUCCEEDED", b"knock")
        folder.rename(folder.with_name("moved"))
        looks = keys.num_looks
        until(lambda: keys.num_looks > looks + 1, "looks")
        client.send(b"again", zmq.NOBLOCK)
        assert server.received() == b"again"


def test_a_key_of_another_role_is_refused(folder):
    with open_server(Keys(folder, "replay")) as server, knock(Keys(folder, "evaluator"), server):
        assert server.outcome() == "FAILED_AUTH"
        assert server.received(0.2) is None
        (reason,) = server.context.refused_connections
        assert "evaluator" in reason


def test_a_revoked_key_is_disconnected_and_other_keys_reconnect(folder):
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
        seen = Counter()
        until(lambda: seen.update([server.outcome()]) or len(seen) == 2, "both outcomes")
        assert (set(seen), seen["SUCCEEDED"]) == ({"FAILED_AUTH", "SUCCEEDED"}, 1)
        first.send(b"first", zmq.NOBLOCK)
        other.send(b"other", zmq.NOBLOCK)
        assert server.received() == b"other"
        assert server.received(0.2) is None
        assert server.context.refused_connections["experience: removed key"] >= 1


class FailingKeys(Keys):
    """Keys that raise an exception in the authenticator on request."""

    fails = False
    num_reads = 0

    def accepted(self, role):
        self.num_reads += role == "actor"
        if self.fails:
            raise RuntimeError("unreadable")
        return super().accepted(role)


def test_a_program_ends_if_its_authenticator_fails(folder):
    keys, stop = FailingKeys(folder, "learner"), Stop()
    publishing = PublishingThread(free_endpoint(), CODEC, stop, keys)
    until(lambda: keys.num_reads > 2, "authenticator")
    keys.fails = True
    until(lambda: stop.poll(), "request to stop")
    with pytest.raises(ZapHandlerError, match="unreadable"):
        publishing.check()


def test_a_failed_authenticator_accepts_no_connections(folder):
    keys = FailingKeys(folder, "replay")
    with open_server(keys) as server:
        keys.fails = True

        def failure():
            try:
                server.context.check()
            except ZapHandlerError as error:
                return error

        assert "unreadable" in str(until(failure, "failure"))
        with knock(Keys(folder, "actor"), server):
            assert server.outcome() != "SUCCEEDED"
            assert server.received(0.2) is None


def test_a_key_that_changes_its_role_is_authenticated_again(folder):
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


def test_an_added_key_is_accepted_without_a_restart(folder, elsewhere):
    added = (elsewhere / "actor.key").read_text()
    keys = mixed(folder, elsewhere, "actor")
    with open_server(Keys(folder, "replay")) as server, knock(keys, server):
        assert server.outcome() == "FAILED_AUTH"
        (folder / "actor.since-today.key").write_text(added)
        until(lambda: server.outcome() == "SUCCEEDED", "success")
        assert server.received() == b"knock"


def test_keys_stay_accepted_while_no_descriptor_is_free(folder, monkeypatch):
    looks = []

    def fail(path):
        looks.append(path)
        raise OSError(errno.EMFILE, "Too many open files")

    with open_server(Keys(folder, "replay")) as server, knock(Keys(folder, "actor"), server) as client:
        assert server.received() == b"knock"
        with monkeypatch.context() as patch:
            patch.setattr("os.listdir", fail)
            until(lambda: looks.count(folder) > 20, "several looks at the keys")
            server.context.check()
        client.send(b"again", zmq.NOBLOCK)
        assert server.received() == b"again"


@pytest.mark.parametrize("spoil", ["nonsense", "no key", "open to all"])
def test_unsafe_public_keys_are_not_accepted(folder, spoil, caplog):
    public, actor = folder / "actor.key", Keys(folder, "actor")
    with open_server(Keys(folder, "replay")) as server:
        {
            "nonsense": lambda: public.write_text("x" * 64),
            # Z85 has characters for more than 32 bits.
            "no key": lambda: public.write_text(f'curve\n    public-key = "{"$" * 40}"\n'),
            "open to all": lambda: public.chmod(0o666),
        }[spoil]()

        def refused():
            with knock(actor, server):
                return server.outcome() == "FAILED_AUTH"

        until(refused, "refusal")
        assert any("actor" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


def test_clients_send_only_to_the_server_with_the_pinned_key(folder, elsewhere):
    """The stranger has the replay server's address and accepts all clients."""
    with open_server(Keys(elsewhere, "replay")) as stranger, knock(Keys(folder, "actor"), stranger):
        assert stranger.outcome() != "SUCCEEDED"
        assert stranger.received(0.2) is None


def old_protocol(endpoint):
    """Sends one message as a PUSH socket by ZMTP 2.0, which has no security mechanisms."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    connection = network.create_connection((host, int(port)), DEADLINE)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x01\x08" + b"\x00\x00" + b"\x00\x05knock")
    return connection


def test_zmtp_2_is_accepted_only_without_keys(folder):
    with open_server(None) as server, old_protocol(server.endpoint):
        assert server.received() == b"knock"
    with open_server(Keys(folder, "replay")) as server, old_protocol(server.endpoint) as connection:
        with suppress(ConnectionResetError):
            while connection.recv(100):  # until the server closes the connection
                pass
        assert server.received(0.2) is None


def test_a_role_cannot_bind_the_sockets_of_another_role(folder):
    with open_context(Keys(folder, "actor")) as context, pytest.raises(UsageError, match=r"actor.*experience"):
        bind(context.socket(zmq.PULL), ANY_PORT, "experience")


def test_size_limits_do_not_include_the_bytes_of_curve(folder):
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


def test_requests_have_the_role_of_their_key(folder):
    async def scenario():
        with open_context(Keys(folder, "learner")) as learner, open_context(Keys(folder, "observer")) as observer:
            endpoint = free_endpoint()
            control = AsyncReceiver(learner, ROUTER, endpoint, "control", high_water_mark=10, max_bytes=1_000)
            client = ControlSocket(observer, endpoint, decode_answer)
            client.send(StatusRequest())
            ((peer, *frames),) = await control.burst(DEADLINE)
            assert decode_request(frames, RUN) == StatusRequest()
            assert peer.role == "observer"
            control.reply(peer, [b"x"])
            assert client.receive(DEADLINE) is None
            assert client.refused == {"length": 1}

    asyncio.run(scenario())


def test_segments_arrive_completely_with_keys(folder):
    async def scenario():
        with open_context(Keys(folder, "replay")) as replay, open_context(Keys(folder, "actor")) as actor:
            endpoint, message = free_endpoint(), CODEC.encode_segment(make_segment(PIXELS))
            limit = max(map(len, message))
            receiver = AsyncReceiver(replay, PULL, endpoint, "experience", high_water_mark=10, max_bytes=limit)
            assert ExperienceSender(actor, endpoint, num_messages=1).send(message)
            ((frame,),) = await receiver.burst(DEADLINE)
            assert bytes(frame) == b"".join(message)

    asyncio.run(scenario())


def test_joining_an_insecure_learner_needs_insecure_no_auth():
    """The learner is bound to a non-loopback address without keys."""
    config = Config(transport=TransportConfig(bind="10.0.0.1", insecure_no_auth=True))
    welcome = WelcomeAnswer(
        run_id=RUN, config=to_dict(config), schema=PIXELS, num_parameters=10, num_actors=4, memory="", replay=[],
        absent="", streams=[], table={}, parameters=[],
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


def test_insecure_binds_cause_a_warning_every_minute(caplog):
    now = [0.0]
    for transport, count in (
        (TransportConfig(bind="0.0.0.0", insecure_no_auth=True), 3),
        (TransportConfig(insecure_no_auth=True), 0),  # loopback
        (TransportConfig(bind="0.0.0.0", keys="keys"), 0),
    ):
        caplog.clear()
        warning = InsecureBindWarning(transport.insecure_address, "", clock=lambda: now[0])
        for _ in range(121):
            warning.check()
            now[0] += 1.0
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["--insecure-no-auth"] * count


def test_receiving_does_not_block_on_the_ping_of_a_silent_client(folder):
    """At the first ping of a connection with a key, poll reports a message although there is none."""
    endpoint, connected, ended = free_endpoint(), threading.Event(), threading.Event()

    def connect_and_send_late():
        with open_context(Keys(folder, "learner")) as context:
            client = context.socket(zmq.DEALER)
            prepare(client, high_water_mark=10, linger=1.0)
            client.heartbeat_ivl = 500  # Our own clients send no pings.
            monitor = client.get_monitor_socket(OUTCOMES)
            connect(client, endpoint, "batches")
            if monitor.poll(DEADLINE * 1000):
                connected.set()
            if not ended.wait(DEADLINE):
                client.send(b"late")

    with open_context(Keys(folder, "replay")) as context:
        receiver = RequestReceiver(context, endpoint, CODEC)
        loader = threading.Thread(target=connect_and_send_late)
        loader.start()
        assert connected.wait(DEADLINE)
        until_pinged = time.monotonic() + 1.5
        while time.monotonic() < until_pinged:
            assert receiver.receive(0.1) == []
        ended.set()
        loader.join()
        assert receiver.refused == {}  # A blocked receiver would have received "late".
