"""Counts connections that end before a key or a message is read, because the two sides do not have the same keys."""

from collections import Counter
from typing import Any

import zmq

from apexreplay.transport.socket_events import SocketEvents

NO_KEY = "no key"  # only one of the two sides uses keys
OTHER_SERVER = "key for another server"  # the client expects another server's key, such as that of an earlier start
UNFINISHED = "unfinished handshake"  # the peer left early, perhaps because only one of the two sides uses keys
REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: NO_KEY,
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: OTHER_SERVER,
}


class FailedHandshakes:
    """The failed handshakes of one socket."""

    def __init__(self, socket: Any, events: int = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) -> None:
        """Call this before the socket is bound or connected. `events`: the kinds of failures that count."""
        self._events = SocketEvents(socket, events)

    def count(self) -> Counter[str]:
        """Returns the number of failures since the last call, by reason."""
        return Counter(REASONS.get(value, UNFINISHED) for value in self._events.read())
