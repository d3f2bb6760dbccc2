"""Counters of drawn, sent and acknowledged batches, in memory shared by the writer and the samplers of a store."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Literal

import numpy as np

from apex.config import LearnerConfig, ReplayConfig
from apex.errors import UsageError
from apex.replay_memory.rate_limiter import RateLimiter
from apex.runtime.private_file import open_private

_ROW_BYTES = 64  # one cache line per row, so that writers of different rows do not slow each other down


class SamplerCounters:
    """Counts in one row per sampler. Only one process writes to each cell. The counts remain when the processes end.

    The first rows belong to the sampler processes of the replay server, the others to loaders on the same host.
    """

    # DRAWN counts transitions. SENT and ACKNOWLEDGED count batches. The others are 0 or 1.
    DRAWN, SENT, ACKNOWLEDGED, ACTIVE, WAITS_FOR_INSERTS, WAITS_FOR_LEARNER = range(6)
    BASE_INSERTED, BASE_DRAWN = 6, 7  # columns of row 0: start of the limiter's line, set when the server starts

    def __init__(self, num_rows: int, path: Path | None = None) -> None:
        """Maps the file at `path` in tmpfs, created if needed. None: uses memory that only forked children share.

        Raises ForeignFileError if another user owns the file, and UsageError if tmpfs is full.
        """
        num_bytes = _ROW_BYTES * num_rows
        if path is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            # The file stays open until the process ends, because its lock shows that the store is in use: `is_wanted`.
            descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                os.posix_fallocate(descriptor, 0, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                os.close(descriptor)
                message = f"cannot allocate {num_bytes} bytes for {path}: {error.strerror}; free some space there"
                raise UsageError(message) from error
        self._cells = np.frombuffer(memory, np.int64).reshape(num_rows, -1)

    def go_on_from(self, num_drawn: int) -> None:
        """Sets the number of transitions drawn before the store was restored. Call this before the first draw."""
        self._cells[0, self.DRAWN] = num_drawn

    def rebase(self, num_inserted: int) -> None:
        """Starts the limiter's line at the present counts, so that earlier excess has no effect."""
        self._cells[0, self.BASE_DRAWN] = self.num_drawn
        self._cells[0, self.BASE_INSERTED] = num_inserted

    def limit(self, limiter: RateLimiter) -> RateLimiter:
        """Returns a limiter like `limiter` whose line starts at the counts that `rebase` has set."""
        base = int(self._cells[0, self.BASE_INSERTED])
        return limiter.rebased(base, int(self._cells[0, self.BASE_DRAWN])) if base else limiter

    def activate(self, sampler: int) -> None:
        """Marks the row as in use. Called by the process that draws with it."""
        row = self._cells[sampler]
        row[self.ACTIVE] = 1
        row[self.ACKNOWLEDGED] = row[self.SENT]  # Nobody will answer the batches of an earlier user.

    def next_number(self, sampler: int) -> int:
        """Returns the number of the row's next batch. Numbers continue when another process takes over the row."""
        return int(self._cells[sampler, self.SENT])

    @property
    def num_drawn(self) -> int:
        """Returns the number of transitions drawn by all samplers."""
        return int(self._cells[:, self.DRAWN].sum())

    @property
    def waits_for(self) -> Literal["", "inserts", "learner"]:
        """Returns what all samplers wait for at present; "" if at least one does not wait."""
        active = self._cells[self._cells[:, self.ACTIVE] == 1]
        if not len(active):
            return ""
        if active[:, self.WAITS_FOR_INSERTS].all():
            return "inserts"
        return "learner" if active[:, self.WAITS_FOR_LEARNER].all() else ""

    def in_flight(self, sampler: int) -> int:
        """Returns the number of batches that a sampler has sent and whose new priorities have not arrived."""
        row = self._cells[sampler]
        return int(row[self.SENT] - row[self.ACKNOWLEDGED])

    def note_sent(self, sampler: int, num_transitions: int) -> None:
        """Counts a batch as sent. Called by the sampler."""
        row = self._cells[sampler]
        row[self.DRAWN] += num_transitions
        row[self.SENT] += 1

    def take_back(self, sampler: int, num_transitions: int) -> None:
        """Removes the newest batch from the counts, because it was not sent. Called by the sampler."""
        row = self._cells[sampler]
        row[self.DRAWN] -= num_transitions
        row[self.SENT] -= 1

    def note_wait(self, sampler: int, *, inserts: bool = False, learner: bool = False) -> None:
        """Records what the sampler waits for, if anything. Called by the sampler."""
        row = self._cells[sampler]
        row[self.WAITS_FOR_INSERTS], row[self.WAITS_FOR_LEARNER] = inserts, learner

    def acknowledge(self, sampler: int, number: int) -> None:
        """Records that the priorities of batch `number` arrived. Earlier batches count as acknowledged too."""
        if 0 <= sampler < len(self._cells):
            row = self._cells[sampler]
            if row[self.ACKNOWLEDGED] <= number < row[self.SENT]:
                row[self.ACKNOWLEDGED] = number + 1


def counter_rows(replay: ReplayConfig, learner: LearnerConfig) -> int:
    """Returns the number of rows: one per sampler process, then one per loader."""
    return replay.num_samplers + max(1, learner.num_loaders)
