"""Both sides of the socket for parameters. docs/protocol.md describes it."""

import math
import time

import zmq

from apex.transport.run_codec import PARAMETER_TOPICS, RunCodec
from apex.transport.timing import REPEAT_SECONDS, SUBSCRIPTION_SECONDS
from apex.types import Parameters
from apexreplay.transport.sockets import Context, Reader, bind, connect, prepare, receive
from apexreplay.wire.header import HEADER

MAX_SUBSCRIPTIONS = 1_000  # maximum subscriptions read per call of `serve`


MOST_SUBSCRIBERS = 2_000  # as many programs as a run may have


class ParameterPublisher:
    """Publishes the learner's parameters: each new snapshot, and the newest one again after a new subscription.

    A slow subscriber misses snapshots, possibly the newest. Therefore the newest snapshot is also published again after
    `repeat_seconds` without a newer one. All subscribers together get at most `bytes_per_second`.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        codec: RunCodec,
        *,
        repeat_seconds: float = REPEAT_SECONDS,
        bytes_per_second: float = math.inf,
    ) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.XPUB)  # Unlike PUB, XPUB reports subscriptions.
        prepare(self._socket, high_water_mark=2, max_bytes=1_024, linger=0.2)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        bind(self._socket, endpoint, "parameters")
        self._newest: Parameters | None = None
        self._subscribers = dict.fromkeys(PARAMETER_TOPICS.values(), 0)  # by topic
        self._asked: set[bytes] = set()  # topics that somebody has subscribed to
        self._repeat_seconds = repeat_seconds
        self._answer_at = time.monotonic() + repeat_seconds
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0  # time from which the budget allows the next snapshot
        self.num_bytes = 0  # sent to all subscribers

    @property
    def period(self) -> float:
        """The minimum seconds between two snapshots."""
        count = 0 if self._newest is None else len(self._newest.values)
        sizes = {topic: HEADER.size + (2 if bfloat16 else 4) * count for bfloat16, topic in PARAMETER_TOPICS.items()}
        return sum(size * self._subscribers[topic] for topic, size in sizes.items()) / self._bytes_per_second

    def publish(self, parameters: Parameters) -> None:
        """Sends a snapshot to all subscribers as soon as the budget allows."""
        self._newest, self._answer_at = parameters, 0.0
        self.serve(0.0)

    def flush(self) -> None:
        """Sends the newest snapshot now if the budget still holds it back."""
        if self._answer_at == 0.0:
            self._free_at = 0.0
            self.serve(0.0)

    def serve(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for subscriptions. Publishes once for all subscriptions within 200 ms."""
        timeout = min(timeout, max(0.0, self._answer_at - time.monotonic(), self._free_at - time.monotonic()))
        for _ in range(MAX_SUBSCRIPTIONS):
            parts = receive(self._socket, timeout)
            if not parts:
                break
            timeout = 0.0
            begins, topic = parts[0][:1] == b"\x01", parts[0][1:]
            if topic in self._subscribers:
                # A wrong peer may subscribe or unsubscribe again and again: the count only limits the rate.
                count = self._subscribers[topic] + (1 if begins else -1)
                self._subscribers[topic] = min(max(count, 0), MOST_SUBSCRIBERS)
                self._asked.add(topic)
            if begins:
                self._answer_at = min(self._answer_at, time.monotonic() + SUBSCRIPTION_SECONDS)
        if time.monotonic() >= max(self._answer_at, self._free_at):
            self._send()

    def _send(self) -> None:
        now = time.monotonic()
        # A repeat must not take the place of a newer snapshot.
        self._answer_at, self._free_at = now + max(self._repeat_seconds, 2 * self.period), now + self.period
        for bfloat16, topic in PARAMETER_TOPICS.items():
            if self._newest is not None and topic in self._asked:
                message = self._codec.encode_parameters(self._newest, bfloat16=bfloat16)
                self._socket.send_multipart(message, copy=False)
                self.num_bytes += len(message[0]) * self._subscribers[topic]


class ParameterSubscriber(Reader):
    """Receives the learner's parameters, rounded to bfloat16 if so wanted. Keeps only the newest snapshot."""

    def __init__(
        self, context: Context, endpoint: str, codec: RunCodec, *, num_parameters: int, bfloat16: bool = False
    ) -> None:
        super().__init__()
        self.num_bytes = 0  # received values, as they were on the wire
        self._codec = codec
        self._bfloat16 = bfloat16
        self._num_parameters = num_parameters
        self._socket = context.socket(zmq.SUB)
        prepare(self._socket, high_water_mark=2, max_bytes=HEADER.size + 4 * num_parameters)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # Keeps the newest message; a HWM of 1 would keep the oldest.
        self._socket.subscribe(PARAMETER_TOPICS[bfloat16])
        connect(self._socket, endpoint, "parameters")

    def receive(self, timeout: float) -> Parameters | None:
        """Returns the newest parameters since the last call, or None after `timeout` seconds without any."""
        decode = self._codec.decode_parameters
        found = self.read(self._socket, timeout, lambda frames: decode(frames, self._num_parameters, self._bfloat16))
        if found is not None:
            self.num_bytes += found.values.nbytes // (2 if self._bfloat16 else 1)
        return found
