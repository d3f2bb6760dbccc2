"""Decides when to reconnect to a peer that does not answer."""

from __future__ import annotations

from apex.transport.timing import RENEW_SECONDS


class ReconnectBackoff:
    """Decides when to renew a connection whose reader may pause for any time. Only answers prove that the reader lives.

    ZeroMQ itself retries until a new connection succeeds, so one renewal is enough after a network failure. The time
    before the next renewal doubles each time, which limits the number of old connections that a paused peer must read.
    """

    def __init__(self) -> None:
        self._limit = RENEW_SECONDS

    def is_due(self, silence: float) -> bool:
        """Returns whether to reconnect now. `silence`: seconds since an answer became due."""
        if silence < RENEW_SECONDS:
            self._limit = RENEW_SECONDS
        if silence < self._limit:
            return False
        self._limit *= 2
        return True
