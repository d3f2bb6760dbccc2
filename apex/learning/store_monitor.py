"""Whether the replay server of a shard is on this host: then a loader draws from its store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from apex.learning.batch_source import LocalSource
from apex.replay_memory.store.location import has_owner
from apex.runtime.private_file import ForeignFileError

log = logging.getLogger("apex")

LOOK_SECONDS = 0.5  # between two looks whether a replay server on this host has come, or made its store anew


class StoreMonitor:
    """Looks now and then for the store of a shard on this host."""

    def __init__(
        self, path: Path, open_source: Callable[[int], LocalSource | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_source` takes the inode of the store at `path`; it returns None while that is only half made."""
        self._path = path
        self._open_source = open_source
        self._clock = clock
        self._look_at = 0.0
        self._inode = 0
        self._source: LocalSource | None = None

    def source(self) -> LocalSource | None:
        """Draws from the store as it is now; None while its replay server is not on this host."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            try:
                inode = self._path.stat().st_ino
            except FileNotFoundError:
                inode = 0
            if inode != self._inode and (not inode or has_owner(self._path)):
                self._source = None
                try:
                    self._source = self._open_source(inode) if inode else None
                    self._inode = inode if self._source is not None else 0
                except ForeignFileError as error:
                    self._inode = inode  # The error is logged once: only another file here is looked at again.
                    log.error("%s", error)
        return self._source
