"""The client's side of a control socket: that of a server of tables, or of a learner."""

import logging
import time
from collections.abc import Callable
from typing import Any, Generic

import zmq

from apexreplay.transport.handshakes import FailedHandshakes
from apexreplay.transport.sockets import Context, Message, Reader, connect, prepare
from apexreplay.transport.timing import CONTROL_RECONNECT_SECONDS, GOODBYE_SECONDS
from apexreplay.wire.header import Frame, WireError
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_control

WARN_SECONDS = 60.0  # minimum time between two warnings about invalid answers

log = logging.getLogger("apexreplay")


class ControlSocket(Reader, Generic[Message]):
    """Sends requests to a program, and receives its answers."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        decode: Callable[[list[Frame]], Message],
        *,
        linger: float = GOODBYE_SECONDS,
        high_water_mark: int = 64,
    ) -> None:
        """Connects. `decode` returns an answer, or raises WireError.

        `linger`: seconds after the end of the context in which ZeroMQ still tries to send queued messages.
        """
        super().__init__()
        self.endpoint = endpoint
        self._decode = decode
        self._warn_at = 0.0
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, high_water_mark=high_water_mark, max_bytes=MAX_JSON_BYTES, linger=linger)
        self._socket.reconnect_ivl_max = int(1000 * CONTROL_RECONNECT_SECONDS)
        self._handshakes = FailedHandshakes(self._socket)
        connect(self._socket, endpoint, "control")

    def send(self, message: Any, run_id: int = 0) -> None:
        """Sends a record without waiting. Drops it if the queue is full."""
        self.send_frames(encode_control(message, run_id))

    def send_frames(self, frames: list[bytes]) -> None:
        """Sends an encoded message, such as an evaluation, without waiting. Drops it if the queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.refused["dropped"] += 1

    def receive(self, timeout: float) -> Message | None:
        """Returns the next answer, or None after `timeout` seconds or for an invalid answer, which is counted."""
        answer = self.read(self._socket, timeout, self._decode)
        self.refused.update(self._handshakes.count())
        return answer

    def refuse(self, error: WireError) -> None:
        """Counts one more invalid answer; warns at most once per WARN_SECONDS."""
        self.refused[error.reason] += 1
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_SECONDS
            log.warning("ignored an invalid answer from %s: %s", self.endpoint, error)
