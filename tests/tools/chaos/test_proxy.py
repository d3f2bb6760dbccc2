"""The proxy carries bytes unchanged, until it cuts, blocks, delays or flips them on request."""

import socket
import threading
import time
from contextlib import closing

import pytest
from support.waiting import DEADLINE, until

from apex.config import Config
from apex.runtime.ports import choose_ports, is_free
from apexreplay.errors import UsageError
from chaos.proxy import ADDRESSES, Proxy


class Echo:
    """A program on 127.0.0.1 that returns the received bytes."""

    def __init__(self, port):
        self.received = b""
        self.listener = socket.create_server(("127.0.0.1", port))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection:
            try:
                while data := connection.recv(65_536):
                    self.received += data
                    connection.sendall(data)
            except OSError:
                return

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.fixture
def transport():
    return choose_ports(Config(), is_free, lambda sentence: None).transport


@pytest.fixture
def echo(transport):
    with closing(Echo(transport.port("experience"))) as echo:
        yield echo


@pytest.fixture
def proxy(transport, echo):
    with closing(Proxy(transport, 1, seed=0)) as proxy:
        yield proxy


def connect(transport):
    connection = socket.create_connection((ADDRESSES["to replay"], transport.port("experience")), DEADLINE)
    connection.settimeout(DEADLINE)
    return connection


def ask(connection, data):
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data):
        part = connection.recv(65_536)
        if not part:
            raise ConnectionResetError
        answer += part
    return answer


def test_a_cut_resets_connections_until_it_ends(proxy, transport):
    with connect(transport) as connection:
        ask(connection, b"x")
        proxy.set("actor-replay", is_cut=True)
        with pytest.raises(ConnectionResetError):
            ask(connection, b"x")
    with connect(transport) as connection, pytest.raises(ConnectionResetError):
        ask(connection, b"x")
    proxy.heal()
    with connect(transport) as connection:
        assert ask(connection, b"x") == b"x"


def test_a_cut_of_another_pair_leaves_bytes_unchanged(proxy, transport):
    proxy.set("learner-replay", is_cut=True)
    data = bytes(range(256)) * 1_000
    with connect(transport) as connection:
        assert ask(connection, data) == data


def test_a_silent_link_holds_bytes_without_an_error(proxy, transport):
    with connect(transport) as connection:
        ask(connection, b"x")
        proxy.set("actor-replay", is_silent=True)
        connection.sendall(b"y")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(DEADLINE)
        proxy.heal()
        assert connection.recv(1) == b"y"


def test_a_delay_lasts_in_each_direction(proxy, transport):
    with connect(transport) as connection:
        proxy.set("actor-replay", delay=0.1)
        began = time.monotonic()
        for _ in range(20):
            connection.sendall(b"z" * 100)
            time.sleep(0.001)
        answer = b""
        while len(answer) < 2_000:
            answer += connection.recv(65_536)
        assert time.monotonic() - began >= 0.2


def test_the_requested_number_of_bits_is_flipped(proxy, transport):
    proxy.set("actor-replay", bits_to_turn=1)
    data = bytes(1_000)
    with connect(transport) as connection:
        answer = ask(connection, data)
        assert sum(byte.bit_count() for byte in answer) == 1
        assert ask(connection, data) == data


def test_an_occupied_address_is_refused_with_a_remedy(proxy, transport):
    with pytest.raises(UsageError, match="port-offset"):
        Proxy(transport, 1, seed=0)


def test_garbage_reaches_the_program_past_the_links(proxy, transport, echo):
    proxy.set("actor-replay", is_cut=True)
    proxy.throw_garbage([b"noise"])  # The other ports are closed, which raises no error.
    until(lambda: echo.received, "the noise")
    assert echo.received == b"noise"
