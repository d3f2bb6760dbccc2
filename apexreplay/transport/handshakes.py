"""Counts connections that end before a key or a message is read, because the two sides do not have the same keys."""

import struct
from collections import Counter
from contextlib import suppress
from typing import Any

import zmq

NO_KEY = "no key"  # only one of the two sides uses keys
OTHER_SERVER = "key for another server"  # the client expects another server's key, such as that of an earlier start
UNFINISHED = "unfinished handshake"  # the peer left early, perhaps because only one of the two sides uses keys
REASONS = {zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: NO_KEY, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: OTHER_SERVER}


class FailedHandshakes:
    """The failed handshakes of one socket. ZeroMQ reports them on a socket of their own."""

    def __init__(self, socket: Any, events: int = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) -> None:
        """Call this before the socket is bound or connected. `events`: the kinds of failures that count."""
        address = f"inproc://handshakes-{id(socket)}"
        socket.monitor(address, events)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # With a limit, ZeroMQ's I/O thread would wait until the events are read.
        self._events.connect(address)

    def count(self) -> Counter[str]:
        """Returns the number of failures since the last call, by reason."""
        found: Counter[str] = Counter()
        with suppress(zmq.Again):
            while True:
                _, value = struct.unpack("=Hi", self._events.recv_multipart(zmq.NOBLOCK)[0])
                found[REASONS.get(value, UNFINISHED)] += 1
        return found
