"""Who is let in: a thread that answers ZeroMQ's question about every key that knocks at a socket of this process.

ZeroMQ asks over ZAP (RFC 27) on `inproc://zeromq.zap.01` of the same context. While nobody answers there, and the
socket enforces its ZAP domain, nobody gets in. A domain is the name of a socket, see `key_store.ENDPOINTS`.
"""

from __future__ import annotations

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

from apex.errors import ConfigError
from apex.transport.curve.key_store import ENDPOINTS, Keys
from apex.types import Role

ENDPOINT = "inproc://zeromq.zap.01"
POLL_MILLISECONDS = 200
LOOK_SECONDS = 1.0  # between two looks whether a list has changed
TELL_SECONDS = 60.0  # between two lines in the log about who was refused
START_SECONDS = 5.0
# Of RFC 27's answers to who is not let in: 400 has its socket give up for ever; with 300 it comes again every few
# seconds, and gets in when its key is added to the list.
LET_IN, COME_AGAIN = b"200", b"300"

log = logging.getLogger("apex")


class ZapHandlerError(RuntimeError):
    """The authenticator has died: nobody can connect any more, and the role must start again."""


class ZapHandler:
    """Answers for all sockets of a context that are bound with keys."""

    def __init__(self, context: Any, keys: Keys) -> None:
        """Starts the thread; returns when it answers."""
        self.refused: Counter[str] = Counter()  # connections, by reason
        self._context = context
        self._keys = keys
        self._ports: dict[str, set[int]] = {}  # by socket
        own = [endpoint for endpoint in ENDPOINTS.values() if endpoint.bound_by == keys.role]
        self._needed = {role for endpoint in own for role in endpoint.open_to}
        self._complaints: dict[str, str] = {}  # why a role's list that is needed cannot be read
        self._lists = {role: self._read(role) for role in Role}
        self._admitted: dict[tuple[str, bytes], str] = {}  # as whom a key went through a socket
        self._removed: set[bytes] = set()  # keys that were on a list once
        self._last = ""  # address of who was refused last
        self._told: Counter[str] = Counter()
        self._tell_at = 0.0
        self._closing = False
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()
        self._ready.wait(START_SECONDS)
        self.check()

    def guard(self, socket_name: str, port: int) -> None:
        """Notes where a socket is: connections to it are cut when a key that went through it is removed."""
        self._ports.setdefault(socket_name, set()).add(port)

    def check(self) -> None:
        """Raises ZapHandlerError if nobody answers any more."""
        if self._failure is not None or not self._thread.is_alive():
            raise ZapHandlerError(f"the authenticator has died: {self._failure!r}") from self._failure

    def close(self) -> None:
        """Ends the thread. From then on nobody gets in."""
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
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_SECONDS
                    self._look()
                    self._tell()
        except BaseException as failure:
            self._failure = failure
        finally:
            if socket is not None:
                socket.close(0)  # Who knocks now is refused at once, instead of waiting for an answer.
            self._ready.set()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to a request; its user id, which every message of the connection will carry, is the role."""
        version, number, domain, address, _, mechanism, *credentials = request
        socket_name = domain.decode(errors="replace")
        if mechanism == b"CURVE" and len(credentials) == 1 and socket_name in ENDPOINTS:
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
        """The role by which this key opens the socket; or "", and why it does not."""
        for role, keys in self._lists.items():
            if key in keys and role in ENDPOINTS[socket_name].open_to:
                return role, ""
        for role, keys in self._lists.items():
            if key in keys:
                return "", f"key of the role {role}"
        return "", "removed key" if key in self._removed else "unknown key"

    def _look(self) -> None:
        """Takes over lists that have changed, and cuts the connections to sockets that a removed key went through.

        ZeroMQ cannot cut one peer, so all that are connected there come again, and are asked for their keys again.
        """
        before, self._lists = self._lists, {role: self._read(role) for role in Role}
        if before == self._lists:
            return
        for role, keys in before.items():
            self._removed |= set(keys) - set(self._lists[role])
        gone = [
            (socket_name, key)
            for (socket_name, key), role in self._admitted.items()
            if self._judge(socket_name, key)[0] != role
        ]
        for entry in gone:
            del self._admitted[entry]
        for socket_name in sorted({socket_name for socket_name, _ in gone}):
            count = cut(self._ports.get(socket_name, ()))
            log.warning(
                "a key that had opened %s was removed: cut all %d connections, who may comes again", socket_name, count
            )

    def _read(self, role: Role) -> dict[bytes, str]:
        """The role's keys. A list that cannot be read lets nobody in, and is read again at the next look."""
        try:
            keys = self._keys.accepted(role)
        except ConfigError as error:
            if role in self._needed and self._complaints.get(role) != str(error):
                self._complaints[role] = str(error)
                log.error("no %s is let in: %s", role, error)
            return {}
        self._complaints.pop(role, None)
        return keys

    def _tell(self) -> None:
        if self.refused != self._told and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_SECONDS
            new = self.refused - self._told
            self._told = self.refused.copy()
            reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(new.items()))
            log.warning("refused connections, the last one from %s: %s", self._last, reasons)


def cut(ports: Collection[int]) -> int:
    """Ends all connections that this process has accepted on these TCP ports; returns how many.

    Works on copies of the descriptors, so that one which ZeroMQ closes meanwhile cannot be mistaken for another.
    """
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(entry))
        except OSError as error:
            if error.errno != errno.EBADF:  # It was closed meanwhile.
                raise  # Without descriptors to spare nothing is cut: better that the role ends.
            continue
        try:
            connection = network.socket(fileno=copy)
        except OSError:  # It is no socket.
            os.close(copy)
            continue
        with connection, suppress(OSError):
            if connection.family in (network.AF_INET, network.AF_INET6) and connection.getsockname()[1] in ports:
                connection.getpeername()  # Raises for the one that listens.
                connection.shutdown(network.SHUT_RDWR)
                count += 1
    return count
