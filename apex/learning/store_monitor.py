"""Whether the replay server of a shard is on this host: then a loader draws from its store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from apex.errors import ConfigError
from apex.learning.batch_source import LocalSource
from apex.replay_memory.batch_drawer import BatchDrawer, DrawSettings
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.location import counters_path, has_owner, store_path
from apex.replay_memory.store.reader import StoreReader
from apex.types import Schema

LOOK_SECONDS = 0.5  # between two looks whether a replay server on this host has come, or made its store anew

log = logging.getLogger("apex")


class StoreMonitor:
    """Looks now and then for the store of a shard on this host."""

    def __init__(
        self,
        schema: Schema,
        run_id: int,
        settings: DrawSettings,
        *,
        row: int,
        num_rows: int,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`row`: of the `num_rows` counters, the one that this loader draws by."""
        self._schema = schema
        self._path = store_path(run_id, settings.shard)
        self._settings = settings
        self._row, self._num_rows = row, num_rows
        self._seed = seed
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
                self._source = self._open(inode) if inode else None
                self._inode = inode if self._source is not None else 0
        return self._source

    def _open(self, inode: int) -> LocalSource | None:
        """A source over the store, or None if it is only half made yet."""
        try:
            reader = StoreReader(self._path, self._schema)
        except ConfigError as error:
            log.info("not yet: %s", error)
            return None
        counters = SamplerCounters(self._num_rows, counters_path(self._path))
        rng = np.random.default_rng([self._seed, self._row, inode])
        return LocalSource(BatchDrawer(reader, counters, self._row, self._settings, rng))
