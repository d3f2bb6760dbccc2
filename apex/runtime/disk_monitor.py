"""Says when nothing can be kept of a run: programs cannot, because their logs are on the same disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from apex.runtime.hardware import Space, read_space

LOOK_SECONDS = 1.0
FULL_BYTES = 64 * 1024  # free at most, where a disk counts as full


class DiskMonitor:
    """Looks at the disk of one folder now and then, and tells of each change."""

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
        """Looks if it is time to."""
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
            lost = "; the run goes on, but logs, curves and checkpoints are lost until that is mended"
            self._tell(state + lost if state else f"the run folder {self._folder} can be written to again")
            self._state = state
