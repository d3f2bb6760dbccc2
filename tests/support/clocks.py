"""A clock that stands still until the test moves it."""

from __future__ import annotations


class Clock:
    """Monotonic seconds; who sleeps by it moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
