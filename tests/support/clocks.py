"""A clock that advances only when the test advances it."""


class Clock:
    """Monotonic seconds, advanced by `sleep`."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
