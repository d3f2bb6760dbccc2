"""Authenticates connections: a thread accepts or refuses the key of each peer that connects to this process.

ZeroMQ sends ZAP requests (RFC 27) to `inproc://zeromq.zap.01` of the same context. If no thread answers them, a socket
that enforces its ZAP domain refuses all connections. The domain is the socket's name in `Keys.endpoints`.
"""

import errno
import logging
import os
import socket as network
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from apexreplay.errors import UsageError
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.handshakes import FailedHandshakes

ENDPOINT = "inproc://zeromq.zap.01"
POLL_MILLISECONDS = 200
LOOK_SECONDS = 1.0  # time between two checks whether the accepted keys have changed
WARN_SECONDS = 60.0  # minimum time between two warnings about refused connections
START_SECONDS = 5.0
# RFC 27 has two status codes for refusals. After 400, the client gives up permanently. After 300, it tries again every
# few seconds, so it can connect once its key has been added.
LET_IN, COME_AGAIN = b"200", b"300"

log = logging.getLogger("apexreplay")


class ZapHandlerError(RuntimeError):
    """The authenticator thread has failed: no peer can connect any more, so the role must restart."""


class ZapHandler:
    """Authenticates the connections to all sockets of a context that are bound with keys."""

    def __init__(self, context: Any, keys: Keys) -> None:
        """Starts the thread and waits until it is ready. Raises ZapHandlerError if it fails."""
        self.refused: Counter[str] = Counter()  # number of refused connections by reason
        self._context = context
        self._keys = keys
        self._ports: dict[str, set[int]] = {}  # ports by socket name
        self._handshakes: list[tuple[str, FailedHandshakes]] = []  # (socket name, its failed handshakes)
        own = [endpoint for endpoint in keys.endpoints.values() if endpoint.bound_by == keys.role]
        self._needed = {role for endpoint in own for role in endpoint.open_to}
        self._complaints: dict[str, str] = {}  # the last error for each role whose keys cannot be read
        self._lists: dict[str, dict[bytes, str]] = {}
        self._lists = {role: self._read(role) for role in keys.roles}
        self._admitted: dict[tuple[str, bytes], str] = {}  # (socket name, key) -> role of the key when it was accepted
        self._removed: set[bytes] = set()  # keys that were accepted earlier
        self._last = ""  # address of the peer that was refused last
        self._reported: Counter[str] = Counter()  # `refused` at the last warning
        self._warn_at = 0.0
        self._closing = False
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()
        self._ready.wait(START_SECONDS)
        self.check()

    def guard(self, socket_name: str, port: int) -> None:
        """Registers a socket's port. If a key used on the socket is removed, all connections to the port are closed."""
        self._ports.setdefault(socket_name, set()).add(port)

    def watch(self, socket_name: str, handshakes: FailedHandshakes) -> None:
        """Counts these failures too: their peers have no key that could be judged. Only the thread may read them."""
        self._handshakes.append((socket_name, handshakes))

    def check(self) -> None:
        """Raises ZapHandlerError if the thread has ended."""
        if self._failure is not None or not self._thread.is_alive():
            problem = f"the authenticator thread has failed, so no peer can connect: {self._failure!r}"
            raise ZapHandlerError(problem) from self._failure

    def close(self) -> None:
        """Ends the thread. After that all new connections are refused."""
        self._closing = True
        self._thread.join(START_SECONDS)

    def _run(self) -> None:
        socket = None
        try:
            socket = self._context.socket(zmq.REP)
            socket.linger = 0
            socket.bind(ENDPOINT)
            self._ready.set()
            look_at = 0.0
            while not self._closing:
                if socket.poll(POLL_MILLISECONDS):
                    socket.send_multipart(self._answer(socket.recv_multipart()))
                for socket_name, handshakes in list(self._handshakes):
                    for reason, count in handshakes.count().items():
                        self.refused[f"{socket_name}: {reason}"] += count
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_SECONDS
                    self._look()
                    self._warn()
        except BaseException as failure:
            self._failure = failure
        finally:
            if socket is not None:
                socket.close(0)  # New connections are then refused at once instead of waiting for an answer.
            self._ready.set()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Returns the reply to a ZAP request. Its user id is the peer's role, which ZeroMQ adds to each message."""
        version, number, domain, address, _, mechanism, *credentials = request
        socket_name = domain.decode(errors="replace")
        if mechanism == b"CURVE" and len(credentials) == 1 and socket_name in self._keys.endpoints:
            key = z85.encode(credentials[0])
            role, reason = self._judge(socket_name, key)
            if role:
                self._admitted[socket_name, key] = role
                return [version, number, LET_IN, b"", role.encode(), b""]
        else:
            reason = "not CURVE"
        self.refused[f"{socket_name}: {reason}"] += 1
        self._last = address.decode(errors="replace")
        return [version, number, COME_AGAIN, b"", b"", b""]

    def _judge(self, socket_name: str, key: bytes) -> tuple[str, str]:
        """Returns (role of the key, "") if the key may connect to the socket, else ("", the reason)."""
        for role, keys in self._lists.items():
            if key in keys and role in self._keys.endpoints[socket_name].open_to:
                return role, ""
        for role, keys in self._lists.items():
            if key in keys:
                return "", f"key of the role {role}"
        return "", "removed key" if key in self._removed else "unknown key"

    def _look(self) -> None:
        """Reads the accepted keys again. If a key was removed, closes all connections of each socket that accepted it.

        ZeroMQ cannot disconnect a single peer. Therefore all peers of such a socket reconnect and are authenticated
        again.
        """
        before, now = self._lists, {role: self._read(role) for role in self._keys.roles}
        if before == now or not self._keys.exist:  # A run folder that is moved or removed revokes no key.
            return
        self._lists = now
        for role, keys in before.items():
            self._removed |= set(keys) - set(self._lists[role])
        gone = [entry for entry, role in self._admitted.items() if self._judge(*entry)[0] != role]
        for entry in gone:
            del self._admitted[entry]
        for socket_name in sorted({socket_name for socket_name, _ in gone}):
            count = cut(self._ports.get(socket_name, ()))
            log.warning("a key of socket %s was removed: closed its %d connections", socket_name, count)

    def _read(self, role: str) -> dict[bytes, str]:
        """Returns the accepted keys of a role; {} if they cannot be read. The next check reads them again.

        If no descriptor is free, nothing is known about them, so the earlier ones stay.
        """
        try:
            keys = self._keys.accepted(role)
        except UsageError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                return self._lists.get(role, {})
            if role in self._needed and self._complaints.get(role) != str(error):
                self._complaints[role] = str(error)
                log.error("refusing all peers of the role %s: %s", role, error)
            return {}
        self._complaints.pop(role, None)
        return keys

    def _warn(self) -> None:
        if self.refused != self._reported and time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_SECONDS
            new = self.refused - self._reported
            self._reported = self.refused.copy()
            reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(new.items()))
            last = f"; the last one with a key came from {self._last}" if self._last else ""
            log.warning("refused connections, reasons and counts: %s%s", reasons, last)


def cut(ports: Collection[int]) -> int:
    """Closes all connections that this process has accepted on these TCP ports; returns their number.

    Works on copies of the descriptors, because ZeroMQ may close a descriptor meanwhile and reuse its number.
    """
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(entry))
        except OSError as error:
            if error.errno != errno.EBADF:  # EBADF: the descriptor was closed meanwhile.
                raise  # With no free descriptor no connection can be closed, so the role must end.
            continue
        try:
            connection = network.socket(fileno=copy)
        except OSError:  # The descriptor is not a socket.
            os.close(copy)
            continue
        with connection, suppress(OSError):
            if connection.family in (network.AF_INET, network.AF_INET6) and connection.getsockname()[1] in ports:
                connection.getpeername()  # Raises OSError for a listening socket.
                connection.shutdown(network.SHUT_RDWR)
                count += 1
    return count
