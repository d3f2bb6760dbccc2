"""Sends segments reliably from an actor process to the replay servers: numbers, windows, receipts, resending."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from apexreplay.client.send_window import SendWindow
from apexreplay.transport.sockets import ReconnectBackoff
from apexreplay.types import Cut, Receipt, Segment, Stream, group_of
from apexreplay.wire.codec import Codec


class Outlet(Protocol):
    """A connection to a replay shard."""

    def send(self, message: list[bytes]) -> bool:
        """Sends without waiting; returns False if the queue is full."""

    def reconnect(self) -> None:
        """Replaces the connection, which brings no receipts, by a new one; drops messages queued in the old one."""


class Receipts(Protocol):
    """The source of receipts."""

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """Returns all receipts that have arrived; waits up to `timeout` seconds for the first."""


class SupersededError(RuntimeError):
    """A stream has a newer incarnation. The replay server ignores this older one, and sends it no more receipts."""


class ReliableSender:
    """Sends the segments of all streams of one process, so that each segment is stored exactly once."""

    def __init__(
        self,
        streams: Sequence[Stream],
        codec: Codec,
        outlets: Sequence[Outlet],
        receipts: Receipts,
        *,
        window: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`outlets`: one per replay shard, in the order of the shards; `receipts` come from all shards."""
        self._codec = codec
        self._outlets = outlets
        self._receipts = receipts
        self._clock = clock
        self._windows = [SendWindow(stream, window) for stream in streams]
        self._group = group_of(streams)
        self._by_actor = {window.stream.actor_id: window for window in self._windows}
        self._backoffs = [ReconnectBackoff() for _ in outlets]
        # per shard: time of the last receipt; while no segment is in flight, the current time
        self._receipt_at = [clock() for _ in outlets]

    @property
    def blocked(self) -> bool:
        """Whether a stream's window is full, so that acting must pause. This is the back-pressure."""
        return any(window.full for window in self._windows)

    @property
    def in_flight(self) -> int:
        """The number of sent segments without acknowledgement."""
        return sum(window.in_flight for window in self._windows)

    @property
    def num_resent(self) -> int:
        """The number of segments that were sent again."""
        return sum(window.num_resent for window in self._windows)

    def send(self, cuts: Sequence[Cut], version: int) -> None:
        """Sends the cut segments; `version`: version of the parameters that chose the newest actions."""
        now = self._clock()
        for cut in cuts:
            window = self._windows[cut.stream_index]
            number = window.next_number
            base = min(window.base, number)
            segment = Segment(window.stream, number, version, cut.records, cut.blob, base, group=self._group)
            shard = window.stream.shard(len(self._outlets))
            message = self._codec.encode_segment(segment, shard)
            window.add(message, now)
            self._outlets[shard].send(message)  # If the queue is full, the window sends the segment again later.

    def pump(self, timeout: float = 0.0) -> None:
        """Takes receipts, waiting up to `timeout` seconds for the first, and sends overdue segments again.

        Raises SupersededError if a receipt has a newer incarnation of one of the streams.
        """
        now = self._clock()
        for receipt in self._receipts.receive(timeout):
            window = self._by_actor.get(receipt.stream.actor_id)
            if window is None:
                continue
            if receipt.stream.incarnation > window.stream.incarnation:
                raise SupersededError(
                    f"another writer has the stream {window.stream.actor_id} now; start this one again"
                )
            self._receipt_at[window.stream.shard(len(self._outlets))] = now
            if window.acknowledge(receipt, now):
                self._resend(window, now)
        self._reconnect_silent(now)
        for window in self._windows:
            if window.overdue(now):
                self._resend(window, now)

    def _reconnect_silent(self, now: float) -> None:
        """Reconnects to replay servers whose receipts are overdue."""
        waiting = {window.stream.shard(len(self._outlets)) for window in self._windows if window.in_flight}
        for shard, outlet in enumerate(self._outlets):
            if shard not in waiting:
                self._receipt_at[shard] = now
            if self._backoffs[shard].is_due(now - self._receipt_at[shard]):
                outlet.reconnect()

    def _resend(self, window: SendWindow, now: float) -> None:
        outlet = self._outlets[window.stream.shard(len(self._outlets))]
        for message in window.resend(now):
            outlet.send(message)
