"""Messages between simulated hosts: lost, delayed, doubled and reordered, and cut off for some time."""

import heapq
from collections import defaultdict

WEATHERS = [(0.0, 0.05), (0.1, 0.3), (0.3, 3.0), (0.02, 12.0)]  # share of lost messages, maximum delay in seconds
DOUBLED = 0.05  # share of messages that arrive twice, as after a reconnect


class Network:
    """Delivers messages by function calls, at times that a seed determines."""

    def __init__(self, rng, clock):
        self._rng, self._clock = rng, clock
        self.loss, self.delay = rng.choice(WEATHERS)
        self._queue = []  # heap of (time of arrival, number, function, arguments)
        self._number = 0
        self._cut_until = defaultdict(float)  # two hosts -> time
        self._arrival = defaultdict(float)  # (source, target) -> time of arrival of the last ordered message

    def post(self, source, target, function, *arguments, ordered=False):
        """Calls `function` when the message arrives. `ordered`: over a connection that neither doubles nor reorders."""
        rng, now = self._rng, self._clock.now
        for _ in range(1 if ordered or rng.random() >= DOUBLED else 2):
            if now < self._cut_until[frozenset((source, target))] or rng.random() < self.loss:
                continue
            at = now + rng.random() * self.delay
            if ordered:
                at = self._arrival[source, target] = max(at, self._arrival[source, target])
            self._number += 1
            heapq.heappush(self._queue, (at, self._number, function, arguments))

    def deliver(self):
        """Delivers all messages that have arrived by now."""
        while self._queue and self._queue[0][0] <= self._clock.now:
            _, _, function, arguments = heapq.heappop(self._queue)
            function(*arguments)

    def cut(self, one, other, seconds):
        """Loses all messages between two hosts for some time."""
        self._cut_until[frozenset((one, other))] = self._clock.now + seconds

    def heal(self):
        """Ends all faults of the network."""
        self.loss, self.delay = 0.0, 0.05
        self._cut_until.clear()
