"""A program's connection to the coordinator: the control socket."""

import logging
import time

import zmq

from apex.transport.json_codec import decode_answer, encode_control
from apex.transport.messages.control import Answer, Request
from apex.transport.timing import CONTROL_RECONNECT_SECONDS
from apexreplay.transport.handshakes import FailedHandshakes
from apexreplay.transport.sockets import Context, Reader, connect, prepare
from apexreplay.transport.timing import GOODBYE_SECONDS
from apexreplay.wire.header import WireError
from apexreplay.wire.json_codec import MAX_JSON_BYTES

WARN_SECONDS = 60.0  # minimum time between two warnings about invalid answers

log = logging.getLogger("apex")


class ControlClient(Reader):
    """Sends requests to the learner's coordinator over the control socket, and receives the answers."""

    def __init__(self, context: Context, endpoint: str, *, linger: float = GOODBYE_SECONDS) -> None:
        """Connects. `linger`: seconds after `close` in which ZeroMQ still tries to send queued messages."""
        super().__init__()
        self.endpoint = endpoint
        self._warn_at = 0.0
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, high_water_mark=64, max_bytes=MAX_JSON_BYTES, linger=linger)
        self._socket.reconnect_ivl_max = int(1000 * CONTROL_RECONNECT_SECONDS)
        self._handshakes = FailedHandshakes(self._socket)
        connect(self._socket, endpoint, "control")

    def send(self, message: Request, run_id: int = 0) -> None:
        """Sends without waiting. Drops the message if the send queue is full."""
        self.send_frames(encode_control(message, run_id))

    def send_frames(self, frames: list[bytes]) -> None:
        """Sends an encoded message, e.g. an evaluation, without waiting."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.refused["dropped"] += 1

    def receive(self, timeout: float) -> Answer | None:
        """Returns the next answer, or None after `timeout` seconds or for an invalid answer, which is counted."""
        answer = self.read(self._socket, timeout, decode_answer)
        self.refused.update(self._handshakes.count())
        return answer

    def refuse(self, error: WireError) -> None:
        """Counts one more invalid answer; warns at most once per WARN_SECONDS."""
        super().refuse(error)
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_SECONDS
            log.warning("ignored an invalid answer from the learner at %s: %s", self.endpoint, error)

    def close(self) -> None:
        """Closes the socket. ZeroMQ still tries to send queued messages for `linger` seconds."""
        self._socket.close()
