"""Socket setup shared by all programs: a context that closes its sockets, queue limits, keepalive and CURVE keys.

Create, use and close each socket in a single thread. Create a context only after the last fork. No function here blocks
longer than its timeout. docs/protocol.md describes what each socket carries.
"""

import errno
import logging
import socket as network
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import zmq

from apexreplay.errors import AddressError, require
from apexreplay.process.lifecycle import POLL_SECONDS
from apexreplay.transport import timing
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.curve.zap_handler import ZapHandler
from apexreplay.transport.handshakes import FailedHandshakes
from apexreplay.wire.header import Frame, WireError

REFUSABLE_BYTES = 1 << 20  # messages up to this size, or up to 4 times the limit of a socket, are refused with a reason
CURVE_BYTES = 1_024  # above the 33 bytes that CURVE adds to a message, and above its longest handshake message
BIND_SECONDS = 3.0  # maximum time to retry a bind, because the program that had the port may just be ending
WARN_SECONDS = 60.0  # time between two warnings about sockets without authentication

Socket = zmq.Socket[bytes]
Message = TypeVar("Message")

log = logging.getLogger("apexreplay")


class Context(zmq.Context[zmq.Socket[bytes]]):
    """A ZeroMQ context that keeps references to its sockets, so that destroying the context closes all of them."""

    kept: tuple[Any, ...] = ()
    keys: Keys | None = None  # None: no authentication
    authenticator: ZapHandler | None = None  # created when the first socket is bound with keys

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        """Creates a socket that is kept as long as the context."""
        made = super().socket(*args, **kwargs)
        self.kept = (*self.kept, made)
        return made

    def check(self) -> None:
        """Raises ZapHandlerError if the authenticator has failed. Programs that bind sockets call this in a loop."""
        if self.authenticator is not None:
            self.authenticator.check()

    @property
    def refused_connections(self) -> dict[str, int]:
        """Number of connections that the authenticator refused, by socket and reason."""
        return {} if self.authenticator is None else dict(self.authenticator.refused)


@contextmanager
def open_context(keys: Keys | None = None) -> Iterator[Context]:
    """Opens a context. On exit, closes all its sockets, each after its linger. With `keys`, all sockets use CURVE.

    Raises UsageError if there are keys but libzmq was built without CURVE.
    """
    has_curve = keys is None or zmq.has("curve")
    require(has_curve, "keys need CURVE, but this libzmq was built without CURVE", remedy="reinstall pyzmq")
    context = Context()
    context.keys = keys
    try:
        yield context
    finally:
        if context.authenticator is not None:
            context.authenticator.close()
        context.destroy()


class ReconnectBackoff:
    """Decides when to renew a connection whose reader may pause for any time. Only answers prove that the reader lives.

    ZeroMQ itself retries until a new connection succeeds, so one renewal is enough after a network failure. The time
    before the next renewal doubles each time, which limits the number of old connections that a paused peer must read.
    """

    def __init__(self, transfer_seconds: float = 0.0) -> None:
        """`transfer_seconds`: longest time that the transfer of an answer takes; no part of it shows before its end."""
        self._limit = self._shortest = timing.RENEW_SECONDS + transfer_seconds

    def is_due(self, silence: float) -> bool:
        """Returns whether to reconnect now. `silence`: seconds since an answer became due."""
        if silence < self._shortest:
            self._limit = self._shortest
        if silence < self._limit:
            return False
        self._limit *= 2
        return True


def bind(socket: Any, endpoint: str, socket_name: str) -> None:
    """Binds a socket; raises AddressError with the address and the reason. `socket_name`: its name in `Keys.endpoints`.

    If the port is in use, tries again for BIND_SECONDS.

    With keys, only the roles that `Keys.endpoints` lists for the socket can connect, while the authenticator runs.
    """
    context = socket.context
    if context.keys is not None:
        role = context.keys.role
        require(context.keys.endpoints[socket_name].bound_by == role, f"the {role} does not bind {socket_name}")
        if context.authenticator is None:
            context.authenticator = ZapHandler(context, context.keys)
        socket.curve_server = 1
        socket.curve_secretkey = context.keys.secret
        socket.zap_domain = socket_name.encode()  # Without an enforced domain CURVE accepts any key.
        socket.zap_enforce_domain = 1
        events = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        context.authenticator.watch(socket_name, FailedHandshakes(socket, events))
    give_up_at = time.monotonic() + BIND_SECONDS
    while True:
        try:
            socket.bind(endpoint)
            break
        except zmq.ZMQError as error:
            taken = error.errno == errno.EADDRINUSE
            if taken and time.monotonic() < give_up_at:
                time.sleep(POLL_SECONDS)
                continue
            socket.close(0)
            if taken:
                remedy = "stop the program that listens there, or choose another port"
                raise AddressError(f"{endpoint} is in use", remedy) from error
            raise AddressError(f"cannot bind {endpoint}: {error}") from error
    if context.authenticator is not None:
        context.authenticator.guard(socket_name, int(socket.last_endpoint.rpartition(b":")[2]))


def connect(socket: Any, endpoint: str, socket_name: str) -> None:
    """Connects without waiting. With keys, only a server with the expected key for `socket_name` is accepted."""
    keys = socket.context.keys
    if keys is not None:
        socket.curve_serverkey = keys.server_key(socket_name)
        socket.curve_secretkey = keys.secret
        socket.curve_publickey = keys.public
    socket.connect(endpoint)


def prepare(
    socket: Any, *, high_water_mark: int, max_bytes: int = 0, linger: float = 0.0, reader_may_pause: bool = False
) -> None:
    """Sets queue limits (messages, bytes), linger (seconds), reconnect back-off, and TCP keepalive for lost peers.

    ZMTP heartbeats stay off: libzmq 4.3.5 aborts the process if a peer dies while a queue is full and the heartbeat
    timer fires before the queue is read again (docs/protocol.md, "Peers that vanish").

    `reader_may_pause`: the reader of this socket may stop for longer than UNACKNOWLEDGED_SECONDS. The kernel cannot
    tell a paused reader from a broken network, so the sender watches for answers instead, see `ReconnectBackoff`.
    """
    socket.sndhwm = socket.rcvhwm = high_water_mark
    socket.linger = int(linger * 1000)
    socket.reconnect_ivl = int(1000 * timing.RECONNECT_SECONDS)
    socket.reconnect_ivl_max = int(1000 * timing.MOST_RECONNECT_SECONDS)
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, timing.KEEPALIVE_PROBES
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = timing.KEEPALIVE_SECONDS, timing.PROBE_SECONDS
    if not reader_may_pause:
        socket.tcp_maxrt = int(1000 * timing.UNACKNOWLEDGED_SECONDS)
    socket.handshake_ivl = socket.connect_timeout = int(1000 * timing.HANDSHAKE_SECONDS)
    if max_bytes:
        socket.maxmsgsize = max_bytes + (CURVE_BYTES if socket.context.keys is not None else 0)


def refusable(max_bytes: int) -> int:
    """Returns the limit to set for a socket that takes `max_bytes`: longer messages arrive and are refused by name.

    ZeroMQ closes the connection of a peer that exceeds the limit that is set, and does not report why.
    """
    return max(4 * max_bytes, REFUSABLE_BYTES)


class Reader:
    """Reads messages and counts invalid ones."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # number of invalid messages by reason

    def refuse(self, error: WireError) -> None:
        """Counts one more invalid message under the error's reason; warns when the count is 1, 2, 4, 8 ..."""
        self.refused[error.reason] += 1
        if self.refused[error.reason].bit_count() == 1:  # There may be very many.
            log.warning("refused %d messages; the last error: %s", self.refused[error.reason], error)

    @property
    def num_refused(self) -> int:
        """The number of invalid messages."""
        return self.refused.total()

    def read(self, socket: Any, timeout: float, decode: Callable[[list[Frame]], Message]) -> Message | None:
        """Returns the next message, or None after `timeout` seconds or for an invalid message, which is counted."""
        parts = receive(socket, timeout, copy=False)
        try:
            return None if parts is None else decode([part.buffer for part in parts])
        except WireError as error:
            self.refuse(error)
            return None


class InsecureBindWarning:
    """Warns every minute while other hosts can reach this program's sockets without keys."""

    def __init__(self, address: str, remedy: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`address`: where the sockets are bound without keys; "" if other hosts cannot reach them or keys are used."""
        self._address = address
        self._remedy = remedy
        self._clock = clock
        self._warn_at = clock()

    def check(self) -> None:
        """Logs the warning if it is due; to be called in a loop."""
        if self._address and self._clock() >= self._warn_at:
            self._warn_at = self._clock() + WARN_SECONDS
            log.warning(
                "--insecure-no-auth: anyone who reaches %s can read and change the data; %s",
                self._address,
                self._remedy,
            )


def receive(socket: Any, timeout: float, *, copy: bool = True) -> list[Any] | None:
    """Returns the parts of the next message, or None after `timeout` seconds without one.

    May return None early: with keys, poll also reports the first ping of a connection, which is not a message.
    """
    if not socket.poll(int(timeout * 1000)):
        return None
    with suppress(zmq.Again):
        parts: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        return parts
    return None


def reachable_address(bound: str, peer: str) -> str:
    """Returns the address at which `peer` and other hosts reach the sockets that this program binds to `bound`.

    If they are bound to all addresses (""), it is the one from which this host sends to `peer`. Sends no packet.
    """
    if bound:
        return bound
    with network.socket(network.AF_INET, network.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
