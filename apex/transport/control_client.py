"""What every program has with the coordinator: the control socket and metrics."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import zmq

from apex.transport.codec import Codec
from apex.transport.control_codec import decode_answer, encode_control
from apex.transport.header import WireError
from apex.transport.json_codec import MAX_JSON_BYTES
from apex.transport.messages.control import Answer, Request
from apex.transport.messages.results import ActorFigures
from apex.transport.sockets import Context, Reader, connect, prepare
from apex.transport.timing import CONTROL_RECONNECT_SECONDS, GOODBYE_SECONDS

TELL_SECONDS = 60.0  # between two warnings about answers that are none

log = logging.getLogger("apex")


class ControlClient(Reader):
    """A program's end of the control socket."""

    def __init__(self, context: Context, endpoint: str, *, linger: float = GOODBYE_SECONDS) -> None:
        """`linger`: seconds that what was said last may take to leave, after it is closed."""
        super().__init__()
        self.endpoint = endpoint
        self._tell_at = 0.0
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, high_water_mark=64, max_bytes=MAX_JSON_BYTES, linger=linger)
        self._socket.reconnect_ivl_max = int(1000 * CONTROL_RECONNECT_SECONDS)
        connect(self._socket, endpoint, "control")

    def send(self, message: Request, run_id: int = 0) -> None:
        """Sends without waiting; without a learner to take it, it is dropped."""
        self.send_frames(encode_control(message, run_id))

    def send_frames(self, frames: list[bytes]) -> None:
        """Sends an encoded message, e.g. an evaluation, without waiting."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.refused["dropped"] += 1

    def receive(self, timeout: float) -> Answer | None:
        """The next message, or None after `timeout` seconds without one."""
        return self.read(self._socket, timeout, decode_answer)

    def refuse(self, error: WireError) -> None:
        """Counts one more; warns now and then."""
        super().refuse(error)
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_SECONDS
            log.warning("refused what the learner at %s answered: %s", self.endpoint, error)

    def close(self) -> None:
        """Closes; what was said last has `linger` seconds to leave."""
        self._socket.close()


class MetricsSender:
    """Any role's end of metrics. A figure that does not arrive is missed by nobody."""

    def __init__(self, context: Context, endpoint: str, codec: Codec) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=100)
        connect(self._socket, endpoint, "metrics")

    def send(self, figures: ActorFigures) -> None:
        """Sends without waiting."""
        with suppress(zmq.Again):
            self._socket.send_multipart(self._codec.encode_metrics(figures), zmq.NOBLOCK)
