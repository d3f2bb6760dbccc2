"""Which segments are on their way: kept until acknowledged, sent again when nothing moves."""

from __future__ import annotations

from apex.transport.timing import MOST_RESEND_SECONDS, RECEIPT_SILENCE_SECONDS, RESEND_SECONDS
from apex.types import Receipt, Stream


class SendWindow:
    """The unacknowledged segments of one stream, at most `window` of them.

    Numbers begin at 0 with the stream's incarnation. `base` is the lowest number that is not acknowledged: it travels
    with every segment, so that a store that began anew knows what will never come again.

    A stream without progress sends its window again. Where inserts wait for a slow learner it may progress every few
    seconds only, while receipts say that the store is there: so it waits twice as long as its newest pause, or 10 s.
    """

    def __init__(self, stream: Stream, window: int) -> None:
        self.stream = stream
        self.next_number = 0
        self.num_resent = 0
        self._window = window
        self._unacknowledged: dict[int, list[bytes]] = {}
        self._progress_at = 0.0
        self._heard_at = 0.0
        self._silence = 0.0  # the longest since the last progress
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = 0.0
        self._store_incarnation: int | None = None

    @property
    def base(self) -> int:
        """Every number below this was acknowledged."""
        return min(self._unacknowledged, default=self.next_number)

    @property
    def in_flight(self) -> int:
        """Segments that are sent and not acknowledged."""
        return len(self._unacknowledged)

    @property
    def full(self) -> bool:
        """Whether the stream must pause: the window counts from the base, as the receipts' bitmap does."""
        return self.next_number - self.base >= self._window

    def add(self, message: list[bytes], now: float) -> None:
        """Keeps the message of segment `next_number`, which is being sent."""
        if not self._unacknowledged:
            self._heard_at, self._silence = now, 0.0
            self._progress_at, self._resend_at = now, now + self._resend_seconds
        self._unacknowledged[self.next_number] = message
        self.next_number += 1

    def acknowledge(self, receipt: Receipt, now: float) -> bool:
        """Drops what the store has. Returns whether the store is another one, and all else must be sent again."""
        if receipt.stream != self.stream:
            return False
        self._silence = max(self._silence, now - self._heard_at)
        self._heard_at = now
        stored = receipt.bitmap << 1  # Now bit 0 is `contiguous` itself, which is not stored.
        arrived = [
            number
            for number in self._unacknowledged
            if number < receipt.contiguous or stored >> (number - receipt.contiguous) & 1
        ]
        for number in arrived:
            del self._unacknowledged[number]
        if arrived:
            slow = 0.0 if self._silence > RECEIPT_SILENCE_SECONDS else now - self._progress_at
            self._resend_seconds = min(max(RESEND_SECONDS, 2 * slow), MOST_RESEND_SECONDS)
            self._silence = 0.0
            self._progress_at, self._resend_at = now, now + self._resend_seconds
        known, self._store_incarnation = self._store_incarnation, receipt.store_incarnation
        return known is not None and known != receipt.store_incarnation and bool(self._unacknowledged)

    def overdue(self, now: float) -> bool:
        """Whether segments are in flight, and none was acknowledged or sent again for too long."""
        return bool(self._unacknowledged) and now >= self._resend_at

    def resend(self, now: float) -> list[list[bytes]]:
        """Everything in flight, lowest number first."""
        self._resend_at = now + self._resend_seconds
        self.num_resent += len(self._unacknowledged)
        return [self._unacknowledged[number] for number in sorted(self._unacknowledged)]
