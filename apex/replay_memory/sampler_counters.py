"""Counters that the samplers of a store and its writer share: drawn, sent and acknowledged batches."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Literal

import numpy as np

from apex.config import LearnerConfig, ReplayConfig
from apex.errors import ConfigError
from apex.replay_memory.rate_limiter import RateLimiter
from apex.runtime.private_file import open_private

_ROW_BYTES = 64  # a cache line each: writers of different rows do not disturb one another


class SamplerCounters:
    """One row per sampler, each cell written by one process. The counts outlive the processes.

    Rows belong to the replay server's sampler processes first, then to the loaders of a learner on the same host.
    """

    DRAWN, SENT, ACKNOWLEDGED, ACTIVE, WAITS_FOR_INSERTS, WAITS_FOR_LEARNER = range(6)  # transitions; batches; 0 or 1
    BASE_INSERTED, BASE_DRAWN = 6, 7  # of row 0: where the limiter's line begins since the replay server was started

    def __init__(self, num_rows: int, path: Path | None = None) -> None:
        """A file in tmpfs at `path`, made if it is not there; or memory that only forked children share.

        Raises ForeignFileError for another user's file, and ConfigError where there is no room.
        """
        num_bytes = _ROW_BYTES * num_rows
        if path is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            # Open for as long as the process lives: its lock says that somebody wants the store, see `is_wanted`.
            descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                os.posix_fallocate(descriptor, 0, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                os.close(descriptor)
                raise ConfigError(f"{path} needs {num_bytes} bytes: {error.strerror}; make room there") from error
        self._cells = np.frombuffer(memory, np.int64).reshape(num_rows, -1)

    def go_on_from(self, num_drawn: int) -> None:
        """Counts what was drawn before the store was restored. To be called before anybody draws by row 0."""
        self._cells[0, self.DRAWN] = num_drawn

    def rebase(self, num_inserted: int) -> None:
        """Has limiters begin their line here: what went before neither is caught up with nor blocks."""
        self._cells[0, self.BASE_DRAWN] = self.num_drawn
        self._cells[0, self.BASE_INSERTED] = num_inserted

    def limit(self, limiter: RateLimiter) -> RateLimiter:
        """The limiter with its line where it begins at present."""
        base = int(self._cells[0, self.BASE_INSERTED])
        return limiter.rebased(base, int(self._cells[0, self.BASE_DRAWN])) if base else limiter

    def activate(self, sampler: int) -> None:
        """Says that somebody draws by this row now; it calls this."""
        row = self._cells[sampler]
        row[self.ACTIVE] = 1
        row[self.ACKNOWLEDGED] = row[self.SENT]  # What an earlier one had in flight is answered no more.

    def next_number(self, sampler: int) -> int:
        """The number of the sampler's next batch; of the row, so that credit comes back whoever else draws by it."""
        return int(self._cells[sampler, self.SENT])

    @property
    def num_drawn(self) -> int:
        """Transitions drawn by all samplers."""
        return int(self._cells[:, self.DRAWN].sum())

    @property
    def waits_for(self) -> Literal["", "inserts", "learner"]:
        """What all samplers wait for at present; "" while one does not."""
        active = self._cells[self._cells[:, self.ACTIVE] == 1]
        if not len(active):
            return ""
        if active[:, self.WAITS_FOR_INSERTS].all():
            return "inserts"
        return "learner" if active[:, self.WAITS_FOR_LEARNER].all() else ""

    def in_flight(self, sampler: int) -> int:
        """Batches of one sampler whose priorities have not come back."""
        row = self._cells[sampler]
        return int(row[self.SENT] - row[self.ACKNOWLEDGED])

    def note_sent(self, sampler: int, num_transitions: int) -> None:
        """Counts a batch; the sampler calls this."""
        row = self._cells[sampler]
        row[self.DRAWN] += num_transitions
        row[self.SENT] += 1

    def take_back(self, sampler: int, num_transitions: int) -> None:
        """Says that the batch counted last was not sent after all; the sampler calls this."""
        row = self._cells[sampler]
        row[self.DRAWN] -= num_transitions
        row[self.SENT] -= 1

    def note_wait(self, sampler: int, *, inserts: bool = False, learner: bool = False) -> None:
        """Says what the sampler waits for, if anything; it calls this."""
        row = self._cells[sampler]
        row[self.WAITS_FOR_INSERTS], row[self.WAITS_FOR_LEARNER] = inserts, learner

    def acknowledge(self, sampler: int, number: int) -> None:
        """Notes that priorities of batch `number` came back: all before it did, or never will. The writer calls."""
        if 0 <= sampler < len(self._cells):
            row = self._cells[sampler]
            if row[self.ACKNOWLEDGED] <= number < row[self.SENT]:
                row[self.ACKNOWLEDGED] = number + 1


def counter_rows(replay: ReplayConfig, learner: LearnerConfig) -> int:
    """Rows of the counters: the samplers', then the loaders'."""
    return replay.num_samplers + max(1, learner.num_loaders)
