"""Whom a bound socket does not listen to for a while: peers whose messages were refused too often.

A peer is a connection. ZeroMQ tells the descriptor that a message came by, and the kernel whose it is: address and
port. So a program that sends rubbish does not take with it the others on its host. See docs/adr/0012.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

TOLERATED = 10  # refused messages of one connection; one is forgiven each FORGIVE_SECONDS
FORGIVE_SECONDS = 1.0
IGNORED_SECONDS = 30.0
MAX_PEERS = 4_096  # that are remembered; the one that misbehaved longest ago is forgotten first
LOG_SECONDS = 10.0  # between two sentences about it

Name = tuple[Any, ...]  # address and port
log = logging.getLogger("apex")


class _Record(NamedTuple):
    name: Name
    level: float  # refused messages, less those that were forgiven
    since: float  # when that was so
    ignored_until: float


class PeerBans:
    """The peers of one bound socket, as far as they were blamed for anything."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_ignored = 0  # messages that were not looked at
        self._clock = clock
        self._records: dict[int, _Record] = {}  # by descriptor, the one that was blamed last at the end
        self._deaf = False  # whether anybody may be ignored: else nothing is looked up
        self._log_at = 0.0
        self._unsaid = 0

    def hears(self, message: Sequence[Any]) -> bool:
        """Whether a message that has just come, as zmq.Frame, is to be read; one that is not is counted."""
        if not self._deaf:
            return True
        descriptor = _descriptor(message[-1])
        record = self._records.get(descriptor)
        if record is None or self._clock() >= record.ignored_until:
            return True
        if _peer_name(descriptor) != record.name:
            del self._records[descriptor]  # Another connection has it now.
            return True
        self.num_ignored += 1
        return False

    def blame(self, message: Sequence[Any], reason: str) -> None:
        """Notes that a message was refused. To be called with what it was read from: zmq.Frame, or its buffer."""
        if not message:
            return
        frame = message[-1]
        descriptor = _descriptor(frame.obj if isinstance(frame, memoryview) else frame)
        name = _peer_name(descriptor)
        if name is None:
            return  # It has gone, or came by no connection.
        now = self._clock()
        record = self._records.get(descriptor)
        level = 1.0
        if record is not None and record.name == name:
            if record.ignored_until > now:
                return  # It had come before that was decided.
            level += max(0.0, record.level - (now - record.since) / FORGIVE_SECONDS)
        ignored_until = 0.0
        if level > TOLERATED:
            level, ignored_until, self._deaf = float(TOLERATED), now + IGNORED_SECONDS, True
            self._say(name, reason, now)
        self._records.pop(descriptor, None)  # It goes to the end.
        self._records[descriptor] = _Record(name, level, now, ignored_until)
        if len(self._records) > MAX_PEERS:
            del self._records[next(iter(self._records))]

    def forgive(self) -> int:
        """Forgets what is forgiven; returns how many are still ignored. To be called now and then."""
        now = self._clock()
        self._records = {
            descriptor: record
            for descriptor, record in self._records.items()
            if record.ignored_until > now or now - record.since < TOLERATED * FORGIVE_SECONDS
        }
        num_ignored = sum(record.ignored_until > now for record in self._records.values())
        self._deaf = num_ignored > 0
        return num_ignored

    def _say(self, name: Name, reason: str, now: float) -> None:
        if now < self._log_at:
            self._unsaid += 1
            return
        self._log_at = now + LOG_SECONDS
        others = f" (and {self._unsaid} others before)" if self._unsaid else ""
        self._unsaid = 0
        log.warning(
            "ignores %s:%s for %.0f s%s: its messages are none, the last was refused for its %s",
            *name[:2],
            IGNORED_SECONDS,
            others,
            reason,
        )


def _descriptor(frame: Any) -> int:
    """The descriptor that a frame came by; -1 where nobody knows."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (AttributeError, zmq.ZMQError):
        return -1


def _peer_name(descriptor: int) -> Name | None:
    """Address and port of the other end; None if the descriptor is no connection (any more)."""
    if descriptor < 0:
        return None
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        name = connection.getpeername()
        return name if isinstance(name, tuple) else None
    except OSError:
        return None
    finally:
        connection.detach()  # It is ZeroMQ's to close.
