"""Both sides of the sockets for experience, receipts, batches and priorities. docs/protocol.md describes each."""

import math
from collections.abc import Sequence
from contextlib import suppress

import zmq

from apexreplay.errors import require
from apexreplay.tables import Table
from apexreplay.transport.socket_events import SocketEvents
from apexreplay.transport.sockets import (
    Context,
    Reader,
    ReconnectBackoff,
    Socket,
    bind,
    connect,
    prepare,
    receive,
    refusable,
)
from apexreplay.transport.timing import GOODBYE_SECONDS
from apexreplay.types import RECEIPT_ROW, BatchMessage, PriorityUpdate, Receipt, Receipts, Stream, group_of
from apexreplay.wire.codec import MAX_PRIORITIES, MAX_RECEIPTS, Codec
from apexreplay.wire.header import HEADER, WireError, receipt_topic, require_field

CONTROL_MARGIN = 4_096
MAX_MESSAGE_BYTES = 1 << 32  # Offsets in a blob, and the length of a message, have 32 bits.
MAX_BURST = 64  # messages that one call handles


class ExperienceSender:
    """Sends an actor's experience to a replay server.

    The send window, not the socket's queue, limits the number of unacknowledged messages.
    """

    def __init__(self, context: Context, endpoint: str, *, num_messages: int) -> None:
        """`num_messages`: maximum number of unacknowledged messages (streams x window); each may be queued twice."""
        self._endpoint = endpoint
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=2 * num_messages + 8, reader_may_pause=True)
        connect(self._socket, endpoint, "experience")

    def reconnect(self) -> None:
        """Renews the connection. Messages in the old one are lost; the send window sends them again."""
        self._socket.disconnect(self._endpoint)
        connect(self._socket, self._endpoint, "experience")

    def send(self, message: list[bytes]) -> bool:
        """Sends without waiting. Returns False if the queue is full; the send window then tries again."""
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True


class ReceiptReceiver(Reader):
    """Receives the receipts for the streams of one actor process.

    One socket receives from all replay shards, so a single wait returns the first receipt from any shard. The topics
    contain the shard, and the group that the sender writes into its segments.
    """

    def __init__(self, context: Context, endpoints: Sequence[str], codec: Codec, streams: Sequence[Stream]) -> None:
        """Connects. `endpoints`: one per shard, in the order of the shards."""
        super().__init__()
        self._codec = codec
        self._socket = context.socket(zmq.SUB)
        prepare(self._socket, high_water_mark=10_000, max_bytes=HEADER.size + MAX_RECEIPTS * RECEIPT_ROW.itemsize)
        for shard in {stream.shard(len(endpoints)) for stream in streams}:
            self._socket.subscribe(receipt_topic(codec.run_id, shard, group_of(streams)))
        for endpoint in endpoints:
            connect(self._socket, endpoint, "receipts")

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """Returns all receipts that have arrived. Waits up to `timeout` seconds for the first."""
        receipts: list[Receipt] = []
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return receipts
        while True:
            try:
                receipts += self._codec.decode_receipts(self._socket.recv_multipart(zmq.NOBLOCK)).each()
            except zmq.Again:
                return receipts
            except WireError as error:
                self.refuse(error)


class ReceiptPublisher:
    """Sends the receipts of a replay server to the actors."""

    def __init__(self, context: Context, endpoint: str, codec: Codec) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUB)  # An XPUB would queue each subscription until it is read.
        prepare(self._socket, high_water_mark=10_000, max_bytes=1_024)
        bind(self._socket, endpoint, "receipts")

    def publish(self, receipts: Receipts, shard: int = 0) -> None:
        """Sends receipts to the subscriber of their group. If the message is lost, later ones replace it."""
        self._socket.send_multipart(self._codec.encode_receipts(receipts, shard), zmq.NOBLOCK)


class RequestReceiver(Reader):
    """Receives the requests of clients for batches, and answers them. Greets each connection: see `BatchRequester`."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        codec: Codec,
        shard: int = 0,
        max_batch: int = MAX_PRIORITIES,
        *,
        linger: float = 0.0,
    ) -> None:
        """Binds the socket. `max_batch`: maximum items of a batch. `linger`: seconds to send the rest at the end."""
        super().__init__()
        self._codec = codec
        self._shard = shard
        self._max_batch = max_batch
        self._socket = context.socket(zmq.ROUTER)
        max_bytes = refusable(HEADER.size)
        prepare(self._socket, high_water_mark=1_000, max_bytes=max_bytes, linger=linger, reader_may_pause=True)
        self._socket.probe_router = 1  # Sends an empty message to each new connection.
        self._socket.router_mandatory = 1  # Reports an answer to a closed connection as an error.
        bind(self._socket, endpoint, "batches")

    def receive(self, timeout: float) -> list[tuple[bytes, int]]:
        """Returns (client, batch size) of requests that have arrived. Waits up to `timeout` seconds for a message.

        Handles at most MAX_BURST messages, so that a client that sends without end does not keep the caller.
        """
        requests: list[tuple[bytes, int]] = []
        for _ in range(MAX_BURST):
            parts = receive(self._socket, timeout)
            if not parts:
                break
            timeout = 0.0
            try:
                size = self._codec.decode_request(parts[1:], self._shard)
                fits = max_batch_bytes(self._codec.table, size) < MAX_MESSAGE_BYTES
                require_field(fits, "count", f"a batch of {size} items could have {MAX_MESSAGE_BYTES} bytes")
                require_field(size <= self._max_batch, "count", f"{size} items, maximum is {self._max_batch}")
                requests.append((parts[0], size))
            except WireError as error:
                self.refuse(error)
        return requests

    def answer(self, client: bytes, batch: BatchMessage) -> bool:
        """Sends a batch without waiting. Returns False if the client is gone, or if its queue is full.

        A batch on its way to a client that dies is lost, although this has returned True.
        """
        try:
            self._socket.send_multipart([client, *self._codec.encode_batch(batch)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True


class BatchRequester(Reader):
    """Asks the sampler processes of a server for batches. Keeps `credit` requests waiting at each.

    A sampler process greets each new connection with an empty message. Then no request waits there, so `credit`
    requests are sent; from then on, one for each batch that arrives.

    If a connection to the only sampler process breaks, the batches that have arrived can still be read: a queue has
    counted them as given. No request follows them, because the greeting of the next connection asks for `credit`. A
    request that is sent before the break is noticed may reach the next process too: one more until another break.
    """

    def __init__(
        self,
        context: Context,
        endpoints: Sequence[str],
        codec: Codec,
        *,
        batch_size: int,
        credit: int,
        shard: int = 0,
        slowest: float = math.inf,
    ) -> None:
        """Connects. Each endpoint is a sampler process; the requests go to them in turn.

        `slowest`: bytes/s of a connection on which the largest batch still arrives before a long silence renews it.
        """
        super().__init__()
        limit = max_batch_bytes(codec.table, batch_size)
        problem = f"a batch of {batch_size} items could have {limit} bytes, but messages have less than 4 GiB"
        require(limit < MAX_MESSAGE_BYTES, problem, remedy="lower batch_size")
        self._codec = codec
        self._batch_size = batch_size
        self._shard = shard
        self._credit = credit
        self._endpoints = endpoints
        self._silence = 0.0  # seconds that calls have waited since the last batch
        self._backoff = ReconnectBackoff(limit / slowest)
        self._keeps_unread, self._has_asked = len(endpoints) == 1, False
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, high_water_mark=1_000 + credit, max_bytes=limit)
        # `immediate` queues no request for a process without a connection, so that the others get them. But ZeroMQ then
        # drops the unread batches of a broken connection.
        self._socket.immediate = not self._keeps_unread
        self._breaks = SocketEvents(self._socket, zmq.EVENT_DISCONNECTED)
        for endpoint in endpoints:
            connect(self._socket, endpoint, "batches")

    def receive(self, timeout: float, *, waited: float = 0.0) -> BatchMessage | None:
        """Returns the next batch, or None after `timeout` seconds or for an invalid message, which is counted.

        Renews the connections after a long silence: then batches on their way are lost. `waited`: seconds that the
        caller has waited for this batch since the last call.
        """
        parts = receive(self._socket, timeout, copy=False)
        if self._breaks.read():  # after `receive`: a break is reported before the greeting of the next connection
            self._has_asked = False
        if parts is None:
            self._silence += timeout + waited
            if self._backoff.is_due(self._silence):
                for endpoint in self._endpoints:
                    self._socket.disconnect(endpoint)
                    connect(self._socket, endpoint, "batches")
                self._has_asked = False
            return None
        frames = [part.buffer for part in parts]
        is_greeting = len(frames) == 1 and not frames[0]
        if not self._keeps_unread or is_greeting != self._has_asked:
            self._has_asked = True
            with suppress(zmq.Again):  # The connection is gone; the next one asks again.
                for _ in range(self._credit if is_greeting else 1):
                    self._socket.send_multipart(self._codec.encode_request(self._batch_size, self._shard), zmq.NOBLOCK)
        if is_greeting:
            return None
        self._silence = 0.0
        try:
            return self._codec.decode_batch(frames, self._batch_size, self._shard)
        except WireError as error:
            self.refuse(error)
            return None

    def close(self) -> None:
        """Closes the socket. No batch that it asked for counts as drawn."""
        self._socket.close(0)
        self._breaks.close()


class PrioritySender:
    """Sends the learner's new priorities, with one socket per shard. If a message is lost, old priorities remain."""

    def __init__(self, context: Context, codec: Codec) -> None:
        self._context = context
        self._codec = codec
        self._sockets: dict[int, Socket] = {}
        self._endpoints: dict[int, str] = {}
        self.num_dropped = 0

    def connect(self, endpoint: str, shard: int = 0) -> None:
        """Connects to `endpoint` for a shard, and disconnects from the shard's earlier endpoint."""
        if shard in self._sockets:
            self._sockets[shard].disconnect(self._endpoints[shard])
        else:
            self._sockets[shard] = self._context.socket(zmq.PUSH)
            prepare(self._sockets[shard], high_water_mark=64, linger=GOODBYE_SECONDS)
        self._endpoints[shard] = endpoint
        connect(self._sockets[shard], endpoint, "priorities")

    def send(self, update: PriorityUpdate) -> None:
        """Sends without waiting. Drops and counts the update if the queue is full or the shard is not connected."""
        socket = self._sockets.get(update.shard)
        try:
            if socket is None:
                raise zmq.Again
            socket.send_multipart(self._codec.encode_priorities(update), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.num_dropped += 1


def max_segment_bytes(table: Table, segment_length: int) -> int:
    """Returns the maximum size in bytes of a message with a segment of `segment_length` items."""
    num_records = segment_length + table.item.max_steps - table.item.width
    steps = table.item.segment_steps(segment_length) * table.max_step_bytes
    return HEADER.size + CONTROL_MARGIN + num_records * table.record.itemsize + steps


def max_batch_bytes(table: Table, batch_size: int) -> int:
    """Returns the maximum size in bytes of one part of a batch message."""
    steps = table.item.max_steps * table.max_step_bytes
    return HEADER.size + CONTROL_MARGIN + batch_size * (table.batch_record.itemsize + steps)
