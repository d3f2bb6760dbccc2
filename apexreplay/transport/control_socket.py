"""The client's side of the control socket of a server of tables."""

from contextlib import suppress

import zmq

from apexreplay.transport.sockets import Context, Reader, connect, prepare
from apexreplay.transport.timing import GOODBYE_SECONDS
from apexreplay.wire.control import Answer, Request, decode_message, encode_message
from apexreplay.wire.json_codec import MAX_JSON_BYTES


class ControlSocket(Reader):
    """Sends requests to a server and receives the answers."""

    def __init__(self, context: Context, endpoint: str) -> None:
        """Connects."""
        super().__init__()
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, high_water_mark=1_000, max_bytes=MAX_JSON_BYTES, linger=GOODBYE_SECONDS)
        connect(self._socket, endpoint, "control")

    def send(self, request: Request) -> None:
        """Sends without waiting. Drops the request if the queue is full."""
        with suppress(zmq.Again):
            self._socket.send_multipart(encode_message(request), zmq.NOBLOCK)

    def receive(self, timeout: float) -> Answer | None:
        """Returns the next answer, or None after `timeout` seconds or for an invalid one, which is counted."""
        return self.read(self._socket, timeout, lambda frames: decode_message(frames, Answer))
