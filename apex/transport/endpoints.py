"""Both ends of experience, receipts, batches, priorities and parameters.

A socket is named as in its endpoint, see `key_store.ENDPOINTS`. What it carries is described in docs/protocol.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import zmq

from apex.transport.codec import Codec
from apex.transport.header import HEADER, WireError, receipt_topic
from apex.transport.sockets import Context, Reader, Socket, bind, connect, prepare, receive
from apex.transport.timing import REPEAT_SECONDS, SUBSCRIPTION_SECONDS
from apex.types import BatchMessage, Parameters, PriorityUpdate, Receipt, Schema, Stream

MAX_SUBSCRIPTIONS = 1_000  # read at a time
CONTROL_MARGIN = 4_096

log = logging.getLogger("apex")


class ExperienceSender:
    """The actor's end of experience. The send window bounds what is on its way, never the socket."""

    def __init__(self, context: Context, endpoint: str, *, num_messages: int) -> None:
        """`num_messages`: streams x window, all resent once: the most that can be on its way."""
        self._endpoint = endpoint
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=2 * num_messages + 8, reader_may_pause=True)
        connect(self._socket, endpoint, "experience")

    def reconnect(self) -> None:
        """Makes a new connection; what lies in the old one is dropped, and the send window sends it again."""
        self._socket.disconnect(self._endpoint)
        connect(self._socket, self._endpoint, "experience")

    def send(self, message: list[bytes]) -> bool:
        """Sends without waiting. False: no room, and the send window will try again."""
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True


class ReceiptReceiver(Reader):
    """The actor's end of receipts, for the streams of one process.

    One socket listens to all replay shards, so that one wait hears whichever answers first; each stream's topic names
    the shard that answers for it.
    """

    def __init__(self, context: Context, endpoints: Sequence[str], codec: Codec, streams: Sequence[Stream]) -> None:
        """`endpoints`: one of each shard, in their order."""
        super().__init__()
        self._codec = codec
        self._socket = context.socket(zmq.SUB)
        prepare(self._socket, high_water_mark=10_000, max_bytes=HEADER.size + 64)
        for stream in streams:
            self._socket.subscribe(receipt_topic(codec.run_id, stream.shard(len(endpoints)), stream.actor_id))
        for endpoint in endpoints:
            connect(self._socket, endpoint, "receipts")

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """All receipts that have arrived; waits up to `timeout` seconds for the first."""
        receipts: list[Receipt] = []
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return receipts
        while True:
            try:
                receipts.append(self._codec.decode_receipt(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return receipts
            except WireError as error:
                self.refuse(error)


class ReceiptPublisher:
    """The replay server's end of receipts."""

    def __init__(self, context: Context, endpoint: str, codec: Codec) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUB)  # An XPUB keeps every subscription until somebody reads it.
        prepare(self._socket, high_water_mark=10_000, max_bytes=1_024)
        bind(self._socket, endpoint, "receipts")

    def publish(self, receipt: Receipt, shard: int = 0) -> None:
        """Sends to whoever subscribed to the stream; a lost one is made good by the next."""
        self._socket.send_multipart(self._codec.encode_receipt(receipt, shard), zmq.NOBLOCK)


class BatchSender:
    """A sampler's end of sampling: batches go to the loaders in turn, past those whose queue is full."""

    def __init__(self, context: Context, endpoints: Sequence[str], codec: Codec) -> None:
        """`endpoints`: one of each loader."""
        self._codec = codec
        self._endpoints = endpoints
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=2, reader_may_pause=True)
        self._socket.immediate = True  # Nothing is queued for a loader that cannot be reached.
        for endpoint in endpoints:
            connect(self._socket, endpoint, "batches")

    def reconnect(self) -> None:
        """Makes new connections; batches that lie in the old ones are dropped."""
        for endpoint in self._endpoints:
            self._socket.disconnect(endpoint)
            connect(self._socket, endpoint, "batches")

    def send(self, batch: BatchMessage, timeout: float) -> bool:
        """Sends, waiting up to `timeout` seconds for room; returns whether it was sent."""
        if not self._socket.poll(int(timeout * 1000), zmq.POLLOUT):
            return False
        self._socket.send_multipart(self._codec.encode_batch(batch), copy=False)
        return True


class BatchReceiver(Reader):
    """A loader's end of sampling: samplers connect to it and keep a few batches, or parts of them, on their way."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        codec: Codec,
        *,
        batch_size: int,
        max_bytes: int,
        num_shards: int = 1,
    ) -> None:
        """`batch_size`: transitions in a message."""
        super().__init__()
        self._codec = codec
        self._batch_size = batch_size
        self._num_shards = num_shards
        self._socket = context.socket(zmq.PULL)
        prepare(self._socket, high_water_mark=2, max_bytes=max_bytes, reader_may_pause=True)
        bind(self._socket, endpoint, "batches")

    @property
    def num_refused(self) -> int:
        """Messages that were no batches."""
        return sum(self.refused.values())

    def receive(self, timeout: float) -> BatchMessage | None:
        """The next batch, or None after `timeout` seconds without one; what is no batch is counted and dropped."""
        decode = self._codec.decode_batch
        return self.read(self._socket, timeout, lambda frames: decode(frames, self._batch_size, self._num_shards))

    def refuse(self, error: WireError) -> None:
        """Counts one more; warns at 1, 2, 4, 8 ..."""
        super().refuse(error)
        if self.num_refused.bit_count() == 1:
            log.warning("%d messages were no batches: %s", self.num_refused, dict(self.refused))


class PrioritySender:
    """The learner's end of priorities, a socket for each shard. One that is lost costs nothing: the old one stays."""

    def __init__(self, context: Context, codec: Codec) -> None:
        self._context = context
        self._codec = codec
        self._sockets: dict[int, Socket] = {}
        self._endpoints: dict[int, str] = {}
        self.num_dropped = 0

    def connect(self, endpoint: str, shard: int = 0) -> None:
        """Sends what is for that shard to `endpoint` from now on."""
        if shard in self._sockets:
            self._sockets[shard].disconnect(self._endpoints[shard])
        else:
            self._sockets[shard] = self._context.socket(zmq.PUSH)
            prepare(self._sockets[shard], high_water_mark=64)
        self._endpoints[shard] = endpoint
        connect(self._sockets[shard], endpoint, "priorities")

    def send(self, update: PriorityUpdate) -> None:
        """Sends to the shard without waiting; without room, or before it is known, it is dropped and counted."""
        socket = self._sockets.get(update.shard)
        try:
            if socket is None:
                raise zmq.Again
            socket.send_multipart(self._codec.encode_priorities(update), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.num_dropped += 1


class ParameterPublisher:
    """The learner's end of parameters: everybody gets the newest; a newcomer gets it at once.

    A subscriber that is slower than the publishes misses some, perhaps the newest: it is repeated when nothing newer
    has come for `repeat_seconds`.
    """

    def __init__(
        self, context: Context, endpoint: str, codec: Codec, *, repeat_seconds: float = REPEAT_SECONDS
    ) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.XPUB)  # It tells of subscriptions, which a PUB does not.
        prepare(self._socket, high_water_mark=2, max_bytes=1_024, linger=0.2)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        bind(self._socket, endpoint, "parameters")
        self._message: list[bytes] = []
        self._repeat_seconds = repeat_seconds
        self._answer_at = time.monotonic() + repeat_seconds
        self.num_bytes = 0

    def publish(self, parameters: Parameters) -> None:
        """Sends a snapshot to all subscribers."""
        self._message = self._codec.encode_parameters(parameters)
        self._send()

    def serve(self, timeout: float) -> None:
        """Answers new subscriptions, those of 200 ms together; waits up to `timeout` seconds for one."""
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
    """Where a host gets the newest parameters, and those only."""

    def __init__(self, context: Context, endpoint: str, codec: Codec, *, num_parameters: int) -> None:
        super().__init__()
        self._codec = codec
        self._num_parameters = num_parameters
        self._socket = context.socket(zmq.SUB)
        prepare(self._socket, high_water_mark=2, max_bytes=HEADER.size + 4 * num_parameters)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # A HWM of 1 would hand out the oldest, not the newest.
        self._socket.subscribe(b"")
        connect(self._socket, endpoint, "parameters")

    def receive(self, timeout: float) -> Parameters | None:
        """The newest parameters since the last call, or None after `timeout` seconds without any."""
        decode = self._codec.decode_parameters
        return self.read(self._socket, timeout, lambda frames: decode(frames, self._num_parameters))


def max_segment_bytes(schema: Schema, segment_length: int) -> int:
    """The most that one segment message may take: episodes of one step have two frames for every step."""
    num_frames = 2 * (segment_length + schema.n_step) + schema.stack
    return (
        HEADER.size + CONTROL_MARGIN + (segment_length + schema.n_step) * 32 + num_frames * (schema.max_frame_bytes + 4)
    )


def max_batch_bytes(schema: Schema, batch_size: int) -> int:
    """The most that one part of a batch message may take."""
    num_frames = 2 * schema.stack + schema.n_step
    return HEADER.size + CONTROL_MARGIN + batch_size * (64 + num_frames * (schema.max_frame_bytes + 4))
