"""Interrupts the steps of writes and reads; see `apexreplay.files.atomic_files.Steps`."""


class Crash(Exception):  # noqa: N818 - stands for the end of a process
    """Ends a write between two steps."""


class CallAt:
    """Calls `function` before a step: from the `skip`-th time on that it comes, at most `times` times.

    `step` is "" for every step. `taken` lists the names of all steps so far.
    """

    def __init__(self, step, function, *, skip=0, times=1_000_000):
        self._step = step
        self._function = function
        self._skip = skip
        self._times = times
        self.calls = 0  # of the function
        self.taken = []

    def __call__(self, step):
        self.taken.append(step)
        if self._step not in ("", step):
            return
        if self._skip:
            self._skip -= 1
        elif self.calls < self._times:
            self.calls += 1
            self._function()


def crash_at(step, *, skip=0):
    """Steps that end a write before `step`, the `skip`-th time that it comes."""

    def crash():
        raise Crash

    return CallAt(step, crash, skip=skip)
