"""When a connection is made anew because its peer does not answer."""

from __future__ import annotations

from apex.transport.timing import RENEW_SECONDS


class ReconnectBackoff:
    """Decides for one connection whose reader may pause for as long as it likes, so that only answers tell it lives.

    ZeroMQ goes on trying to connect by itself. So one new connection is enough for a network that was cut, and the
    growing pauses bound what a peer that is merely stuck has to keep of the connections before.
    """

    def __init__(self) -> None:
        self._limit = RENEW_SECONDS

    def is_due(self, silence: float) -> bool:
        """Whether to connect anew now; `silence`: seconds without an answer that was waited for."""
        if silence < RENEW_SECONDS:
            self._limit = RENEW_SECONDS
        if silence < self._limit:
            return False
        self._limit *= 2
        return True
