"""Reports when the run folder cannot be written. Other processes cannot log this, as their logs are in that folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from apex.runtime.hardware import Space, read_space
from apex.sentences import describe_disk

CHECK_SECONDS = 1.0  # time between two checks of the disk
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
        self._check_at = 0.0
        self._flaw = ""  # why the folder cannot be written; "": it can

    def check(self) -> None:
        """Checks the disk if CHECK_SECONDS have passed since the last check."""
        now = self._clock()
        if now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        space = self._read(self._folder)
        flaw = space.flaw or ("is on a full disk" if space.free <= FULL_BYTES else "")
        if flaw != self._flaw:
            self._flaw = flaw
            self._tell(describe_disk(str(self._folder), flaw))
