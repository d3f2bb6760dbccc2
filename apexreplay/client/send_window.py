"""Keeps sent segments until they are acknowledged, and sends them again if no acknowledgement comes."""

from apexreplay.transport.timing import MOST_RESEND_SECONDS, RECEIPT_SILENCE_SECONDS, RESEND_SECONDS
from apexreplay.types import Receipt, Stream


class SendWindow:
    """The unacknowledged segments of one stream, at most `window` of them.

    Segments are numbered from 0 in each incarnation of the stream. `base` is the lowest number without acknowledgement.
    Every segment contains `base`, so that a new, empty replay memory knows which numbers will never be sent again.

    A stream sends its window again if no segment is acknowledged for some time. If inserts wait for a slow learner,
    acknowledgements may be seconds apart, although other receipts show that the server is alive. The time is therefore
    twice the gap between the last two acknowledgements, at most 10 s.
    """

    def __init__(self, stream: Stream, window: int) -> None:
        self.stream = stream
        self.next_number = 0
        self.num_resent = 0
        self._window = window
        self._unacknowledged: dict[int, list[bytes]] = {}
        self._progress_at = 0.0
        self._receipt_at = 0.0
        self._silence = 0.0  # longest time without a receipt since the last progress
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = 0.0
        self._store_incarnation: int | None = None

    @property
    def base(self) -> int:
        """The lowest number without acknowledgement."""
        return min(self._unacknowledged, default=self.next_number)

    @property
    def in_flight(self) -> int:
        """The number of sent segments without acknowledgement."""
        return len(self._unacknowledged)

    @property
    def full(self) -> bool:
        """Whether the stream must pause: the window counts from the base, as the receipts' bitmap does."""
        return self.next_number - self.base >= self._window

    def add(self, message: list[bytes], now: float) -> None:
        """Keeps the message of segment `next_number`, which the caller sends."""
        if not self._unacknowledged:
            self._receipt_at, self._silence = now, 0.0
            self._progress_at, self._resend_at = now, now + self._resend_seconds
        self._unacknowledged[self.next_number] = message
        self.next_number += 1

    def acknowledge(self, receipt: Receipt, now: float) -> bool:
        """Drops acknowledged segments; returns whether the replay memory is new and the rest must be sent again."""
        if receipt.stream != self.stream:
            return False
        self._silence = max(self._silence, now - self._receipt_at)
        self._receipt_at = now
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
        """Returns whether segments are in flight, and the last acknowledgement or resend was too long ago."""
        return bool(self._unacknowledged) and now >= self._resend_at

    def resend(self, now: float) -> list[list[bytes]]:
        """Returns all messages in flight, lowest number first, to be sent again."""
        self._resend_at = now + self._resend_seconds
        self.num_resent += len(self._unacknowledged)
        return [self._unacknowledged[number] for number in sorted(self._unacknowledged)]
