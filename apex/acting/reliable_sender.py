"""From an actor process to the replay server: numbered, windowed, acknowledged, sent again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from apex.acting.segment_builder import Cut
from apex.acting.send_window import SendWindow
from apex.transport.codec import Codec
from apex.transport.reconnect_backoff import ReconnectBackoff
from apex.types import Receipt, Segment, Stream


class Outlet(Protocol):
    """Where segments go."""

    def send(self, message: list[bytes]) -> bool:
        """Sends without waiting; False if there is no room."""

    def reconnect(self) -> None:
        """Makes a new connection, as no receipt came over the old one; what it still held is dropped."""


class Receipts(Protocol):
    """Where receipts come from."""

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """All that have arrived; waits up to `timeout` seconds for the first."""


class SupersededError(RuntimeError):
    """A stream has a newer life: the store takes nothing more from this one, and no receipt will come."""


class ReliableSender:
    """The streams of one process on their way to the store, each segment exactly once."""

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
        """`outlets`: one to each replay shard, in their order; `receipts` come from all of them."""
        self._codec = codec
        self._outlets = outlets
        self._receipts = receipts
        self._clock = clock
        self._windows = [SendWindow(stream, window) for stream in streams]
        self._by_actor = {window.stream.actor_id: window for window in self._windows}
        self._backoffs = [ReconnectBackoff() for _ in outlets]
        self._heard_at = [clock() for _ in outlets]  # by shard: a receipt, or nothing was in flight

    @property
    def blocked(self) -> bool:
        """Whether a stream's window is full: exploring must pause. That is the back-pressure."""
        return any(window.full for window in self._windows)

    @property
    def in_flight(self) -> int:
        """Segments that are sent and not acknowledged."""
        return sum(window.in_flight for window in self._windows)

    @property
    def num_resent(self) -> int:
        """Segments that were sent again."""
        return sum(window.num_resent for window in self._windows)

    def send(self, cuts: Sequence[Cut], version: int) -> None:
        """Sends what was cut; `version` is that of the parameters which chose the newest actions."""
        now = self._clock()
        for cut in cuts:
            window = self._windows[cut.stream_index]
            number = window.next_number
            segment = Segment(window.stream, number, version, cut.records, cut.blob, min(window.base, number))
            shard = window.stream.shard(len(self._outlets))
            message = self._codec.encode_segment(segment, shard)
            window.add(message, now)
            self._outlets[shard].send(message)  # Without room it stays in the window, and is sent again.

    def pump(self, timeout: float = 0.0) -> None:
        """Takes receipts, waiting up to `timeout` seconds for one, and sends again what is overdue.

        Raises SupersededError when a receipt tells of a newer life of one of the streams.
        """
        now = self._clock()
        for receipt in self._receipts.receive(timeout):
            window = self._by_actor.get(receipt.stream.actor_id)
            if window is None:
                continue
            if receipt.stream.incarnation > window.stream.incarnation:
                raise SupersededError(
                    f"actor {window.stream.actor_id} was leased to somebody else meanwhile; start again"
                )
            self._heard_at[window.stream.shard(len(self._outlets))] = now
            if window.acknowledge(receipt, now):
                self._resend(window, now)
        self._reconnect_silent(now)
        for window in self._windows:
            if window.overdue(now):
                self._resend(window, now)

    def _reconnect_silent(self, now: float) -> None:
        """Makes new connections to servers that should send receipts and do not."""
        waiting = {window.stream.shard(len(self._outlets)) for window in self._windows if window.in_flight}
        for shard, outlet in enumerate(self._outlets):
            if shard not in waiting:
                self._heard_at[shard] = now
            if self._backoffs[shard].is_due(now - self._heard_at[shard]):
                outlet.reconnect()

    def _resend(self, window: SendWindow, now: float) -> None:
        outlet = self._outlets[window.stream.shard(len(self._outlets))]
        for message in window.resend(now):
            outlet.send(message)
