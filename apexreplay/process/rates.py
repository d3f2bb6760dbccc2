"""Growth rates of counters for display. Counters that grow in bursts need a window that covers several bursts."""

from collections import deque

WINDOW_SECONDS = 10.0  # covers several bursts: sixteen actors on a small machine send segments together every 1 to 2 s


class Rates:
    """Growth per second of counters over the last WINDOW_SECONDS."""

    def __init__(self, now: float, *counts: float) -> None:
        """`now`: time in seconds by a monotonic clock, the same clock in every later call."""
        self._looks = deque([(now, counts)])

    def measure(self, now: float, *counts: float) -> tuple[float, ...]:
        """Returns one rate per counter; 0 for a counter that is now lower because it was reset within the window."""
        while len(self._looks) > 1 and now - self._looks[1][0] >= WINDOW_SECONDS:
            self._looks.popleft()
        then, before = self._looks[0]
        self._looks.append((now, counts))
        seconds = max(now - then, 1e-3)
        return tuple(max(0.0, (count - known) / seconds) for count, known in zip(counts, before, strict=True))
