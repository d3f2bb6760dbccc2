"""Sockets: the only module that knows ZeroMQ.

A socket is made, used and closed by one thread of one process; a context is made after the last fork. Nothing here
blocks for longer than the timeout that it is given. What a socket carries is described in docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket as network
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from apex.config import ConfigError
from apex.header import HEADER, MAX_JSON_BYTES, Frame, WireError, receipt_topic
from apex.peers import Peers
from apex.types import Parameters, PriorityUpdate, Receipt, SampleBatch, Schema, Stream
from apex.wire import Codec, decode_control, encode_control

RECONNECT_SECONDS = (0.1, 2.0)  # first and longest pause between two attempts
KEEPALIVE_SECONDS = (2.0, 10.0)  # between two ZMTP pings; silence after which a peer counts as gone
COALESCE_SECONDS = 0.2  # new subscriptions within this time are answered by one publish
GOODBYE_SECONDS = 1.0  # what is said last on the control socket may take this long to leave
CONTROL_MARGIN = 4_096

PULL, ROUTER = zmq.PULL, zmq.ROUTER

log = logging.getLogger("apex")

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class AddressError(ConfigError):
    """An address that cannot be bound."""


class RefusedError(ConfigError):
    """The learner does not want this program; the text says why."""


class _OwnContext(zmq.Context[zmq.Socket[bytes]]):
    """Keeps its sockets until it is destroyed, so that its end closes them all, forgotten ones too."""

    kept: tuple[Any, ...] = ()

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a socket that lives as long as the context."""
        made = super().socket(*args, **kwargs)
        self.kept = (*self.kept, made)
        return made


@contextmanager
def open_context(io_threads: int = 1) -> Iterator[Context]:
    """A context whose sockets are all closed at its end, each after its own linger."""
    context = _OwnContext(io_threads)
    try:
        yield context
    finally:
        context.destroy()


def local_address(peer: str) -> str:
    """This host's address as `peer` sees it: the one that packets to it leave from. Nothing is sent."""
    with network.socket(network.AF_INET, network.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """Reads HOST or HOST:PORT; raises ConfigError on anything else."""
    host, _, port = text.partition(":")
    number = port or str(default_port)
    if not host or not number.isdecimal() or not 0 < int(number) < 65_536:
        raise ConfigError(f"--learner must be HOST or HOST:PORT, got {text!r}")
    return host, int(number)


def prepare(
    socket: Any, *, high_water_mark: int, max_bytes: int = 0, linger: float = 0.0, receive_only: bool = False
) -> None:
    """Sets what every socket of ours has: bounds, back-off and heartbeats, which ZeroMQ leaves off."""
    socket.sndhwm = socket.rcvhwm = high_water_mark
    socket.linger = int(linger * 1000)
    socket.reconnect_ivl, socket.reconnect_ivl_max = (int(1000 * seconds) for seconds in RECONNECT_SECONDS)
    socket.heartbeat_ivl, socket.heartbeat_timeout = (int(1000 * seconds) for seconds in KEEPALIVE_SECONDS)
    if max_bytes:
        socket.maxmsgsize = max_bytes


def bind(socket: Any, endpoint: str) -> None:
    """Binds, or raises AddressError with the address and the reason."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno == errno.EADDRINUSE:
            raise AddressError(
                f"{endpoint} is in use: end what listens there, or set --transport.port-offset"
            ) from error
        raise AddressError(f"cannot bind {endpoint}: {error}") from error


def _buffers(frames: Sequence[Any]) -> list[memoryview]:
    return [frame.buffer for frame in frames]


class _Reader:
    """Counts what it refuses."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}

    def refuse(self, error: WireError) -> None:
        self.refused[error.reason] = self.refused.get(error.reason, 0) + 1


# --- actor ------------------------------------------------------------------------------------------------------------


class ExperienceSender:
    """The actor's end of experience. The send window bounds what is on its way, never the socket."""

    def __init__(self, context: Context, endpoint: str, *, num_messages: int) -> None:
        """`num_messages`: streams x window, all resent once: the most that can be on its way."""
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=2 * num_messages + 8)
        self._socket.connect(endpoint)

    def send(self, message: list[bytes]) -> bool:
        """Sends without waiting. False: no room, and the send window will try again."""
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True


class ReceiptReceiver(_Reader):
    """The actor's end of receipts, for the streams of one process.

    One socket listens to all replay shards, so that one wait hears whichever answers first; each stream's topic names
    the shard that answers for it.
    """

    def __init__(self, context: Context, endpoints: Sequence[str], codec: Codec, streams: Sequence[Stream]) -> None:
        """`endpoints`: one of each shard, in their order."""
        super().__init__()
        self._codec = codec
        self._socket = context.socket(zmq.SUB)
        # No bound: libzmq 4.3 may abort when heartbeats meet a full queue of a socket that connects (its issue 3937),
        # and a process that is stopped for an hour misses 25 MB of receipts at most.
        prepare(self._socket, high_water_mark=0, max_bytes=HEADER.size + 64)
        for stream in streams:
            self._socket.subscribe(receipt_topic(codec.run_id, stream.shard(len(endpoints)), stream.actor_id))
        for endpoint in endpoints:
            self._socket.connect(endpoint)

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


# --- samplers and learner ---------------------------------------------------------------------------------------------


class BatchSender:
    """A sampler's end of sampling."""

    def __init__(self, context: Context, endpoint: str, codec: Codec) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=2)
        self._socket.connect(endpoint)

    def place(self, shard: int) -> None:
        """Frames travel compressed."""

    def send(self, batch: SampleBatch, timeout: float) -> bool:
        """Sends, waiting up to `timeout` seconds for room; returns whether it was sent."""
        if not self._socket.poll(int(timeout * 1000), zmq.POLLOUT):
            return False
        self._socket.send_multipart(self._codec.encode_batch(batch), copy=False)
        return True


class BatchReceiver(_Reader):
    """The learner's end of sampling: samplers connect to it and keep a few batches, or parts of them, on their way."""

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
        self.peers = Peers()
        self._socket = context.socket(zmq.PULL)
        prepare(self._socket, high_water_mark=2, max_bytes=max_bytes)
        bind(self._socket, endpoint)

    @property
    def num_refused(self) -> int:
        """Messages that were no batches, or came from peers that had sent too many such."""
        return sum(self.refused.values()) + self.peers.num_ignored

    def receive(self, timeout: float) -> SampleBatch | None:
        """The next batch, or None after `timeout` seconds without one; what is no batch is counted and dropped."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        frames = self._socket.recv_multipart(copy=False)
        if not self.peers.hears(frames):
            return None
        try:
            return self._codec.decode_batch(_buffers(frames), self._batch_size, self._num_shards)
        except WireError as error:
            self.refuse(error)
            self.peers.blame(frames, error.reason)
            if self.num_refused.bit_count() == 1:  # Now and then: there may be very many.
                log.warning("%d messages were no batches: %s", self.num_refused, self.refused)
            return None


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
        self._sockets[shard].connect(endpoint)

    def send(self, update: PriorityUpdate) -> None:
        """Sends to the shard without waiting; without room, or before it is known, it is dropped and counted."""
        socket = self._sockets.get(update.shard)
        try:
            if socket is None:
                raise zmq.Again
            socket.send_multipart(self._codec.encode_priorities(update), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.num_dropped += 1


# --- parameters -------------------------------------------------------------------------------------------------------


class ParameterPublisher:
    """The learner's end of parameters: everybody gets the newest; a newcomer gets it at once.

    A subscriber that is slower than the publishes misses some, perhaps the newest: it is repeated when nothing newer
    has come for `repeat_seconds`.
    """

    def __init__(self, context: Context, endpoint: str, codec: Codec, *, repeat_seconds: float = 5.0) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.XPUB)
        prepare(self._socket, high_water_mark=2, max_bytes=1_024, linger=0.2)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        bind(self._socket, endpoint)
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
        if self._socket.poll(int(timeout * 1000)) and self._socket.recv()[:1] == b"\x01":
            self._answer_at = min(self._answer_at, time.monotonic() + COALESCE_SECONDS)
        if time.monotonic() >= self._answer_at:
            self._send()

    def _send(self) -> None:
        self._answer_at = time.monotonic() + self._repeat_seconds
        if self._message:
            self._socket.send_multipart(self._message, copy=False)
            self.num_bytes += len(self._message[0])


class ParameterSubscriber(_Reader):
    """Where a host gets the newest parameters, and those only."""

    def __init__(self, context: Context, endpoint: str, codec: Codec, *, num_parameters: int) -> None:
        super().__init__()
        self._codec = codec
        self._num_parameters = num_parameters
        self._socket = context.socket(zmq.SUB)
        prepare(self._socket, high_water_mark=2, max_bytes=HEADER.size + 4 * num_parameters)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # A HWM of 1 would hand out the oldest, not the newest.
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def receive(self, timeout: float) -> Parameters | None:
        """The newest parameters since the last call, or None after `timeout` seconds without any."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        try:
            return self._codec.decode_parameters(_buffers([self._socket.recv(copy=False)]), self._num_parameters)
        except WireError as error:
            self.refuse(error)
            return None


# --- control and metrics ----------------------------------------------------------------------------------------------


class ControlClient(_Reader):
    """A program's end of the control socket."""

    def __init__(self, context: Context, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, high_water_mark=64, max_bytes=MAX_JSON_BYTES, linger=GOODBYE_SECONDS)
        self._socket.connect(endpoint)

    def send(self, message: dict[str, Any], run_id: int = 0) -> None:
        """Sends without waiting; without a learner to take it, it is dropped."""
        self.send_frames(encode_control(message, run_id))

    def send_frames(self, frames: list[bytes]) -> None:
        """Sends an encoded message, e.g. an evaluation, without waiting."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.refuse(WireError("dropped", "no learner takes it"))

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, or None after `timeout` seconds without one."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        try:
            return decode_control(self._socket.recv_multipart())
        except WireError as error:
            self.refuse(error)
            return None

    def close(self) -> None:
        """Closes; what was said last has a second to leave."""
        self._socket.close()


class MetricsSender:
    """Any role's end of metrics. A figure that does not arrive is missed by nobody."""

    def __init__(self, context: Context, endpoint: str, codec: Codec) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUSH)
        prepare(self._socket, high_water_mark=100)
        self._socket.connect(endpoint)

    def send(self, message: dict[str, Any]) -> None:
        """Sends without waiting."""
        try:
            self._socket.send_multipart(self._codec.encode_metrics(message), zmq.NOBLOCK)
        except zmq.Again:
            return


# --- asyncio ends: the replay server's writer and the learner's coordinator -----------------------------------------


class AsyncReceiver(_Reader):
    """A bound socket that is read in bursts: one wait, then all that has arrived, without a wait for each.

    One task reads it and answers. zmq.asyncio is not used: its wait for one message costs half as much again.
    """

    def __init__(
        self,
        context: Context,
        kind: int,
        endpoint: str,
        *,
        high_water_mark: int,
        max_bytes: int,
        peers: Peers | None = None,
    ) -> None:
        super().__init__()
        self.peers = peers or Peers()
        self._more = False  # whether messages may be left to receive
        self._socket = context.socket(kind)
        prepare(self._socket, high_water_mark=high_water_mark, max_bytes=max_bytes, linger=GOODBYE_SECONDS)
        bind(self._socket, endpoint)
        self._descriptor = int(self._socket.FD)

    async def burst(self, timeout: float, limit: int = 64) -> list[list[Frame]]:
        """Up to `limit` messages; waits up to `timeout` seconds for the first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        messages = self._arrived(limit)
        if messages:
            await asyncio.sleep(0)  # Without a wait between them, bursts would leave no turn to the other tasks.
        while not messages and (remaining := deadline - loop.time()) > 0:
            await (asyncio.sleep(0) if self._more else self._wait(loop, remaining))
            messages = self._arrived(limit)
        return messages

    def _arrived(self, limit: int) -> list[list[Frame]]:
        messages: list[list[Frame]] = []
        self._more = True
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._more = False
                break
            if self.peers.hears(frames):
                messages.append([frame.buffer for frame in frames])
        return messages

    def blame(self, error: WireError, message: Sequence[Frame]) -> None:
        """Counts a message that was refused, and that its peer has sent it."""
        self.refuse(error)
        self.peers.blame(message, error.reason)

    async def _wait(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        """Waits for a message, or less long: the descriptor also tells of peers.

        To be called where none was left to receive: only then does the next one make the descriptor readable. It is
        watched during the wait alone: it stays readable until somebody receives, and the loop would spin.
        """
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = loop.call_later(timeout, wake)
        loop.add_reader(self._descriptor, wake)
        try:
            await woken
        finally:
            loop.remove_reader(self._descriptor)
            timer.cancel()

    def reply(self, identity: Frame, frames: list[bytes]) -> None:
        """Answers a peer of a ROUTER; one that is gone is not missed."""
        try:
            self._socket.send_multipart([bytes(identity), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.refuse(WireError("unanswered", str(error)))


class ReceiptPublisher:
    """The replay server's end of receipts."""

    def __init__(self, context: Context, endpoint: str, codec: Codec) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUB)  # An XPUB keeps every subscription until somebody reads it.
        prepare(self._socket, high_water_mark=10_000, max_bytes=1_024)
        bind(self._socket, endpoint)

    def publish(self, receipt: Receipt, shard: int = 0) -> None:
        """Sends to whoever subscribed to the stream; a lost one is made good by the next."""
        self._socket.send_multipart(self._codec.encode_receipt(receipt, shard), zmq.NOBLOCK)


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
