"""How fast counters grow, for people to read: what comes in bursts needs a window that holds several of them."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10.0  # Sixteen streams on a small machine cut their segments together, every one or two seconds.


class Rates:
    """Growth per second of counters that are looked at now and then, over the last WINDOW_SECONDS."""

    def __init__(self, now: float, *counts: float) -> None:
        """`now` by any clock that only goes on, in seconds, as in every later call."""
        self._looks = deque([(now, counts)])

    def measure(self, now: float, *counts: float) -> tuple[float, ...]:
        """One rate for each counter; 0 for one that has begun anew within the window and is below what it was."""
        while len(self._looks) > 1 and now - self._looks[1][0] >= WINDOW_SECONDS:
            self._looks.popleft()
        then, before = self._looks[0]
        self._looks.append((now, counts))
        seconds = max(now - then, 1e-3)
        return tuple(max(0.0, (count - known) / seconds) for count, known in zip(counts, before, strict=True))
