"""Counters of drawn, sent and acknowledged batches, in memory shared by the writer and the samplers of a store."""

import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Literal

import numpy as np

from apexreplay.errors import UsageError
from apexreplay.rate_limiter import RateLimiter

_LINE_BYTES = 64  # header and rows have a cache line each, so that writers of different rows do not delay each other


def _line(*names: str) -> np.dtype[Any]:
    """Returns the dtype of int64 fields that fill one cache line."""
    return np.dtype({"names": names, "formats": ["<i8"] * len(names), "itemsize": _LINE_BYTES})


# The server writes the header when it starts. `drawn_before`: transitions drawn before the store was restored.
# `base_inserted`, `base_drawn`: start of the limiter's line; 0: not set.
_HEADER = _line("drawn_before", "base_inserted", "base_drawn")
# `drawn` and `given` count transitions, `sent` and `acknowledged` count batches; the others are 0 or 1. `given` follows
# `drawn` once a batch cannot be taken back any more.
_ROW = _line("drawn", "sent", "acknowledged", "active", "waits_for_inserts", "waits_for_learner", "given")


class SamplerCounters:
    """Counts in one row per sampler. Only one process writes to each field. The counts remain when the processes end.

    The first rows belong to the sampler processes of the replay server, the others to loaders on the same host.
    """

    def __init__(self, num_rows: int, path: Path | None = None) -> None:
        """Maps the file at `path` in tmpfs, created if needed. None: uses memory that only forked children share.

        Raises UsageError if tmpfs is full.
        """
        num_bytes = _LINE_BYTES * (1 + num_rows)
        if path is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            # The file stays open as long as this object, because its lock shows that the store is in use: `is_wanted`.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                os.posix_fallocate(descriptor, 0, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                os.close(descriptor)
                problem = f"cannot allocate {num_bytes} bytes for {path}: {error.strerror}"
                raise UsageError(problem, "free some space there") from error
            weakref.finalize(self, os.close, descriptor)
        self._header = np.frombuffer(memory, _HEADER, 1)[0]
        self._rows = np.frombuffer(memory, _ROW, num_rows, _LINE_BYTES)

    def continue_from(self, num_drawn: int) -> None:
        """Sets the number of transitions drawn before the store was restored."""
        self._header["drawn_before"] = num_drawn

    def rebase(self, num_inserted: int) -> None:
        """Starts the limiter's line at the present counts, so that earlier excess has no effect."""
        self._header["base_drawn"] = self.num_drawn
        self._header["base_inserted"] = num_inserted

    def limit(self, limiter: RateLimiter) -> RateLimiter:
        """Returns a limiter like `limiter` whose line starts at the counts that `rebase` has set."""
        base = int(self._header["base_inserted"])
        return limiter.rebased(base, int(self._header["base_drawn"])) if base else limiter

    def activate(self, sampler: int) -> None:
        """Marks the row as in use. Called by the process that draws with it."""
        row = self._rows[sampler]
        row["active"] = 1
        row["given"] = row["drawn"]  # What a killed process has drawn counts as given.
        row["acknowledged"] = row["sent"]  # Nobody will answer the batches of an earlier user.

    def deactivate(self, sampler: int | slice = slice(None)) -> None:
        """Marks a row as unused; called by the process that has drawn with it. Or all rows, when the server starts."""
        self._rows["active"][sampler] = 0

    def next_number(self, sampler: int) -> int:
        """Returns the number of the row's next batch. Numbers continue when another process takes over the row."""
        return int(self._rows["sent"][sampler])

    @property
    def num_drawn(self) -> int:
        """Returns the number of transitions drawn by all samplers."""
        return int(self._header["drawn_before"] + self._rows["drawn"].sum())

    @property
    def num_given(self) -> int:
        """Returns the number of transitions drawn by sampler processes, without those that may be taken back."""
        return int(self._header["drawn_before"] + self._rows["given"].sum())

    @property
    def waits_for(self) -> Literal["", "inserts", "learner"]:
        """Returns what the samplers wait for at present; "" if there are none, or at least one does not wait.

        "inserts" if any waits for them: the others wait for the learner, such as sampler processes without a request.
        """
        active = self._rows[self._rows["active"] == 1]
        inserts, learner = active["waits_for_inserts"], active["waits_for_learner"]
        if not len(active) or not (inserts | learner).all():
            return ""
        return "inserts" if inserts.any() else "learner"

    def in_flight(self, sampler: int) -> int:
        """Returns the number of batches that a sampler has sent and whose new priorities have not arrived."""
        row = self._rows[sampler]
        return int(row["sent"] - row["acknowledged"])

    def note_sent(self, sampler: int, num_transitions: int) -> None:
        """Counts a batch as sent. Called by the sampler."""
        row = self._rows[sampler]
        row["drawn"] += num_transitions
        row["sent"] += 1

    def pass_over(self, sampler: int, num_items: int) -> None:
        """Counts draws of a queue that were passed over. Called by the sampler."""
        self._rows["drawn"][sampler] += num_items

    def note_given(self, sampler: int) -> None:
        """Counts all that the sampler has drawn as given. Called by the sampler."""
        self._rows["given"][sampler] = self._rows["drawn"][sampler]

    def take_back(self, sampler: int, num_transitions: int) -> None:
        """Removes the newest batch from the counts, because it was not sent. Called by the sampler."""
        row = self._rows[sampler]
        row["drawn"] -= num_transitions
        row["sent"] -= 1

    def note_wait(self, sampler: int, *, inserts: bool = False, learner: bool = False) -> None:
        """Records what the sampler waits for, if anything, and that it is in use. Called by the sampler."""
        row = self._rows[sampler]
        row["active"] = 1
        row["waits_for_inserts"], row["waits_for_learner"] = inserts, learner

    def has_sent(self, sampler: int, number: int) -> bool:
        """Returns whether there is such a sampler, and it has sent a batch of this number."""
        return 0 <= sampler < len(self._rows) and number < self._rows["sent"][sampler]

    def acknowledge(self, sampler: int, number: int) -> None:
        """Records that the priorities of batch `number` arrived. Earlier batches count as acknowledged too."""
        if self.has_sent(sampler, number) and number >= self._rows["acknowledged"][sampler]:
            self._rows["acknowledged"][sampler] = number + 1
