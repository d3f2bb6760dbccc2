"""Events of a socket's connections, which ZeroMQ reports on a socket of their own."""

import struct
from contextlib import suppress
from itertools import count
from typing import Any

import zmq

_numbers = count()  # ZeroMQ frees the address of a closed monitor later than its socket's id.


class SocketEvents:
    """The events of one socket that nobody has read yet."""

    def __init__(self, socket: Any, kinds: int) -> None:
        """Call this before the socket is bound or connected. `kinds`: of events, such as zmq.EVENT_DISCONNECTED."""
        address = f"inproc://events-{next(_numbers)}"
        socket.monitor(address, kinds)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # With a limit, ZeroMQ's I/O thread would wait until the events are read.
        self._events.connect(address)

    def read(self) -> list[int]:
        """Returns the value of each event since the last call, such as the reason of a failed handshake."""
        found: list[int] = []
        with suppress(zmq.Again):
            while True:
                _, value = struct.unpack("=Hi", self._events.recv_multipart(zmq.NOBLOCK)[0])
                found.append(value)
        return found

    def close(self) -> None:
        """Closes the socket of the events."""
        self._events.close(0)
