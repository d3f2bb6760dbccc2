"""Reports when the run folder cannot be written. Other processes cannot log this, as their logs are in that folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from apex.runtime.hardware import Space, read_space

LOOK_SECONDS = 1.0  # time between two checks of the disk
FULL_BYTES = 64 * 1024  # a disk with at most this much free space counts as full


class DiskMonitor:
    """Checks the disk of one folder periodically and reports each change to `tell`."""

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None],
        *,
        read: Callable[[Path], Space] = read_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._read = read
        self._clock = clock
        self._look_at = 0.0
        self._state = ""

    def look(self) -> None:
        """Checks the disk if LOOK_SECONDS have passed since the last check."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        space, state = self._read(self._folder), ""
        if space.flaw:
            state = f"the run folder {self._folder} {space.flaw}"
        elif space.free <= FULL_BYTES:
            state = f"the disk of {self._folder} is full ({space.free // 1024} KiB free)"
        if state.partition("(")[0] != self._state.partition("(")[0]:
            lost = "; the run continues, but logs, curves and checkpoints are lost until this is fixed"
            self._tell(state + lost if state else f"the run folder {self._folder} is writable again")
            self._state = state
