"""Both sides of the socket for parameters. docs/protocol.md describes it."""

import time

import zmq

from apex.transport.run_codec import RunCodec
from apex.transport.timing import REPEAT_SECONDS, SUBSCRIPTION_SECONDS
from apex.types import Parameters
from apexreplay.transport.sockets import Context, Reader, bind, connect, prepare, receive
from apexreplay.wire.header import HEADER

MAX_SUBSCRIPTIONS = 1_000  # maximum subscriptions read per call of `serve`


class ParameterPublisher:
    """Publishes the learner's parameters: each new snapshot, and the newest one again after a new subscription.

    A slow subscriber misses snapshots, possibly the newest. Therefore the newest snapshot is also published again after
    `repeat_seconds` without a newer one.
    """

    def __init__(
        self, context: Context, endpoint: str, codec: RunCodec, *, repeat_seconds: float = REPEAT_SECONDS
    ) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.XPUB)  # Unlike PUB, XPUB reports subscriptions.
        prepare(self._socket, high_water_mark=2, max_bytes=1_024, linger=0.2)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        bind(self._socket, endpoint, "parameters")
        self._message: list[bytes] = []
        self._repeat_seconds = repeat_seconds
        self._answer_at = time.monotonic() + repeat_seconds
        self.num_bytes = 0

    def publish(self, parameters: Parameters) -> None:
        """Sends a snapshot of the parameters to all subscribers."""
        self._message = self._codec.encode_parameters(parameters)
        self._send()

    def serve(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for subscriptions. Publishes once for all subscriptions within 200 ms."""
        timeout = min(timeout, max(0.0, self._answer_at - time.monotonic()))
        for _ in range(MAX_SUBSCRIPTIONS):
            parts = receive(self._socket, timeout)
            if not parts:
                break
            timeout = 0.0
            if parts[0][:1] == b"\x01":
                self._answer_at = min(self._answer_at, time.monotonic() + SUBSCRIPTION_SECONDS)
        if time.monotonic() >= self._answer_at:
            self._send()

    def _send(self) -> None:
        self._answer_at = time.monotonic() + self._repeat_seconds
        if self._message:
            self._socket.send_multipart(self._message, copy=False)
            self.num_bytes += len(self._message[0])


class ParameterSubscriber(Reader):
    """Receives the learner's parameters. Keeps only the newest snapshot."""

    def __init__(self, context: Context, endpoint: str, codec: RunCodec, *, num_parameters: int) -> None:
        super().__init__()
        self._codec = codec
        self._num_parameters = num_parameters
        self._socket = context.socket(zmq.SUB)
        prepare(self._socket, high_water_mark=2, max_bytes=HEADER.size + 4 * num_parameters)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # Keeps the newest message; a HWM of 1 would keep the oldest.
        self._socket.subscribe(b"")
        connect(self._socket, endpoint, "parameters")

    def receive(self, timeout: float) -> Parameters | None:
        """Returns the newest parameters since the last call, or None after `timeout` seconds without any."""
        decode = self._codec.decode_parameters
        return self.read(self._socket, timeout, lambda frames: decode(frames, self._num_parameters))
