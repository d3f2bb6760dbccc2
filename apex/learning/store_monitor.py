"""Finds the replay memory of a shard on this host, so that a loader can draw from it directly."""

import time
from collections.abc import Callable
from pathlib import Path

from apex.learning.batch_source import LocalSource
from apex.replay_memory.store.location import has_owner

LOOK_SECONDS = 0.5  # time between two checks for a new replay memory file


class StoreMonitor:
    """Checks periodically for the replay memory of a shard on this host."""

    def __init__(
        self, path: Path, open_source: Callable[[int], LocalSource | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_source` takes the inode of the file at `path`; it returns None while the file is being created."""
        self._path = path
        self._open_source = open_source
        self._clock = clock
        self._look_at = 0.0
        self._inode = 0
        self._source: LocalSource | None = None

    def source(self, *, now_at_latest: bool = False) -> LocalSource | None:
        """Returns a source over the current replay memory; None while the shard's server is not on this host.

        Looks for the file every LOOK_SECONDS, and with `now_at_latest` also in this call if there is no source.
        """
        now = self._clock()
        if now >= self._look_at or (now_at_latest and self._source is None):
            self._look_at = now + LOOK_SECONDS
            try:
                inode = self._path.stat().st_ino
            except FileNotFoundError:
                inode = 0
            if inode != self._inode and (not inode or has_owner(self._path)):
                self._source = self._open_source(inode) if inode else None
                self._inode = inode if self._source is not None else 0
        return self._source
