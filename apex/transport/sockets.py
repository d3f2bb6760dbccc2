"""What every socket of ours has: a context that closes it, bounds, heartbeats and, where there are keys, CURVE.

A socket is made, used and closed by one thread of one process; a context is made after the last fork. Nothing here
blocks for longer than the timeout that it is given. What a socket carries is described in docs/protocol.md.
"""

from __future__ import annotations

import errno
import logging
import socket as network
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq

from apex.config import TransportConfig
from apex.errors import ConfigError, require
from apex.runtime.lifecycle import POLL_SECONDS, Wait
from apex.transport.curve.key_store import ENDPOINTS, Keys
from apex.transport.curve.zap_handler import ZapHandler
from apex.transport.header import Frame, WireError
from apex.transport.timing import (
    HANDSHAKE_SECONDS,
    KEEPALIVE_PROBES,
    KEEPALIVE_SECONDS,
    MOST_RECONNECT_SECONDS,
    PROBE_SECONDS,
    RECONNECT_SECONDS,
    UNACKNOWLEDGED_SECONDS,
)

CURVE_BYTES = 1_024  # more than CURVE adds to a message (33), and than its own longest one in a handshake
BORROWED_SECONDS = 90.0  # that a port which an outgoing connection has is waited for; it stays so for 60 after its end
LISTENING = "0A"  # in /proc/net/tcp
WARN_SECONDS = 60.0  # between two warnings that sockets are open to everybody

Socket = zmq.Socket[bytes]
Message = TypeVar("Message")

log = logging.getLogger("apex")


class AddressError(ConfigError):
    """An address that cannot be bound."""


class RefusedError(ConfigError):
    """The learner does not want this program; the text says why."""


class Context(zmq.Context[zmq.Socket[bytes]]):
    """Keeps its sockets until it is destroyed, so that its end closes them all, forgotten ones too."""

    kept: tuple[Any, ...] = ()
    keys: Keys | None = None  # None: no authentication
    authenticator: ZapHandler | None = None  # there once a socket is bound with keys

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a socket that lives as long as the context."""
        made = super().socket(*args, **kwargs)
        self.kept = (*self.kept, made)
        return made

    def check(self) -> None:
        """Raises ZapHandlerError if nobody can connect any more. Whoever binds calls it now and then."""
        if self.authenticator is not None:
            self.authenticator.check()

    @property
    def refused_connections(self) -> dict[str, int]:
        """How many the authenticator has turned away, by socket and reason."""
        return {} if self.authenticator is None else dict(self.authenticator.refused)


@contextmanager
def open_context(keys: Keys | None = None, io_threads: int = 1) -> Iterator[Context]:
    """A context whose sockets are all closed at its end, each after its own linger; with `keys` all of them use CURVE.

    Raises ConfigError for keys where libzmq was built without libsodium.
    """
    require(keys is None or zmq.has("curve"), "keys need CURVE, and this libzmq was built without it: reinstall pyzmq")
    context = Context(io_threads)
    context.keys = keys
    try:
        yield context
    finally:
        if context.authenticator is not None:
            context.authenticator.close()
        context.destroy()


def bind(socket: Any, endpoint: str, socket_name: str) -> None:
    """Binds, or raises AddressError with the address and the reason. `socket_name`: the socket's name in the protocol.

    With keys only those get in to whom the socket is open, and nobody while the authenticator is not there.
    """
    context = socket.context
    if context.keys is not None:
        require(ENDPOINTS[socket_name].bound_by == context.keys.role, f"the {context.keys.role} does not bind {socket}")
        if context.authenticator is None:
            context.authenticator = ZapHandler(context, context.keys)
        socket.curve_server = 1
        socket.curve_secretkey = context.keys.secret
        socket.zap_domain = socket_name.encode()  # Were it empty, or not enforced, CURVE would let any key in.
        socket.zap_enforce_domain = 1
    wait, give_up_at = Wait("a socket"), time.monotonic() + BORROWED_SECONDS
    while True:
        try:
            socket.bind(endpoint)
            break
        except zmq.ZMQError as error:
            taken = error.errno == errno.EADDRINUSE
            if taken and not _has_listener(endpoint) and time.monotonic() < give_up_at:
                wait.on(f"{endpoint}, whose port an outgoing connection has borrowed")
                time.sleep(POLL_SECONDS)
                continue
            socket.close(0)
            if taken:
                raise AddressError(
                    f"{endpoint} is in use: end what listens there, or set --transport.port-offset"
                ) from error
            raise AddressError(f"cannot bind {endpoint}: {error}") from error
    if context.authenticator is not None:
        context.authenticator.guard(socket_name, int(socket.last_endpoint.rpartition(b":")[2]))


def _has_listener(endpoint: str) -> bool:
    """Whether a program listens on the port, at whatever address.

    If none does, the port is that of an outgoing connection: the kernel takes such numbers from 32768 ... 60999, where
    ours are too, unless net.ipv4.ip_local_reserved_ports names them. A server that starts again must outwait it.
    """
    port = f"{int(endpoint.rpartition(':')[2]):04X}"
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(path).read_text().splitlines()[1:]:
                _, address, _, state, *_ = line.split()
                if state == LISTENING and address.endswith(f":{port}"):
                    return True
    return False


def connect(socket: Any, endpoint: str, socket_name: str) -> None:
    """Connects without waiting. With keys, only to the holder of the key that is pinned for `socket_name`."""
    keys = socket.context.keys
    if keys is not None:
        socket.curve_serverkey = keys.server_key(socket_name)
        socket.curve_secretkey = keys.secret
        socket.curve_publickey = keys.public
    socket.connect(endpoint)


def prepare(
    socket: Any, *, high_water_mark: int, max_bytes: int = 0, linger: float = 0.0, reader_may_pause: bool = False
) -> None:
    """Sets what every socket of ours has: bounds, back-off, and TCP keepalive to notice a peer that vanished.

    There are no ZMTP heartbeats: libzmq 4.3.5 aborts the process when a peer dies while its queue is full and the
    heartbeat timer fires before it is read on (docs/protocol.md, "Peers that vanish").

    `reader_may_pause`: the reader of this socket may stop for longer than UNACKNOWLEDGED_SECONDS. The kernel cannot
    tell that from a cut network, so whoever sends watches for answers, see `ReconnectBackoff`.
    """
    socket.sndhwm = socket.rcvhwm = high_water_mark
    socket.linger = int(linger * 1000)
    socket.reconnect_ivl, socket.reconnect_ivl_max = int(1000 * RECONNECT_SECONDS), int(1000 * MOST_RECONNECT_SECONDS)
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, KEEPALIVE_PROBES
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = KEEPALIVE_SECONDS, PROBE_SECONDS
    if not reader_may_pause:
        socket.tcp_maxrt = int(1000 * UNACKNOWLEDGED_SECONDS)
    socket.handshake_ivl = socket.connect_timeout = int(1000 * HANDSHAKE_SECONDS)
    if max_bytes:
        socket.maxmsgsize = max_bytes + (CURVE_BYTES if socket.context.keys is not None else 0)


class Reader:
    """Reads messages, and counts what it refuses."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # messages, by reason

    def refuse(self, error: WireError) -> None:
        """Counts one more refusal of this kind."""
        self.refused[error.reason] += 1

    def read(self, socket: Any, timeout: float, decode: Callable[[list[Frame]], Message]) -> Message | None:
        """The next message, or None after `timeout` seconds without one. What `decode` refuses is counted."""
        parts = receive(socket, timeout, copy=False)
        try:
            return None if parts is None else decode([part.buffer for part in parts])
        except WireError as error:
            self.refuse(error)
            return None


class InsecureBindWarning:
    """Warns every minute while sockets are bound beyond this host without keys."""

    def __init__(self, transport: TransportConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = "" if transport.is_loopback or transport.keys else transport.bind
        self._clock = clock
        self._warn_at = clock()

    def check(self) -> None:
        """Warns if it is time; to be called in a loop."""
        if self._address and self._clock() >= self._warn_at:
            self._warn_at = self._clock() + WARN_SECONDS
            log.warning(
                "--insecure-no-auth: whoever reaches %s can read and change this run; apex keys new makes keys",
                self._address,
            )


def receive(socket: Any, timeout: float, *, copy: bool = True) -> list[Any] | None:
    """The parts of the next message, or None after `timeout` seconds without one.

    With keys, a connection's first ping makes poll report input although there is no message: nothing waits here then.
    """
    if not socket.poll(int(timeout * 1000)):
        return None
    with suppress(zmq.Again):
        parts: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        return parts
    return None


def local_address(peer: str) -> str:
    """This host's address as `peer` sees it: the one that packets to it leave from. Nothing is sent."""
    with network.socket(network.AF_INET, network.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """Reads HOST or HOST:PORT; raises ConfigError on anything else."""
    host, _, port = text.partition(":")
    number = port or str(default_port)
    if not host or not number.isdecimal() or not 0 < int(number) < 65_536:
        raise ConfigError(f"--learner must be HOST or HOST:PORT, got {text!r}")
    return host, int(number)
