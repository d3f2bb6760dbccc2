"""A file that only grows, and that survives a full disk."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("apex")

MAX_PENDING_BYTES = 1 << 20  # of one file that cannot be written; what comes after is dropped and counted


class AppendFile:
    """A file that only grows, by whole records, and that outlives a disk that is full for a while."""

    def __init__(self, path: Path, *, lines: bool = False) -> None:
        self.num_dropped = 0
        self._path = path
        self._lines = lines
        self._descriptor = -1
        self._pending = bytearray()
        self._waits = False  # for a disk that takes it

    def append(self, record: bytes) -> None:
        """Takes a record, to be written by the next flush."""
        if len(self._pending) + len(record) > MAX_PENDING_BYTES:
            self.num_dropped += 1
            return
        self._pending += record

    def flush(self) -> None:
        """Writes all that is pending, or nothing of it: a file ends with a whole record, whatever the disk does."""
        if not self._pending:
            return
        try:
            if self._descriptor >= 0 and not os.fstat(self._descriptor).st_nlink:
                self.close()  # Somebody has removed it.
            if self._descriptor < 0:
                self._open()
            self._write_whole()
        except OSError as error:
            self.close()
            if not self._waits:
                cause = os.strerror(error.errno or errno.EIO)
                log.warning("cannot write %s: %s; the run goes on, its curves have a gap", self._path, cause)
            self._waits = True
            return
        if self._waits:
            log.warning("%s is written again; %d records were given up", self._path, self.num_dropped)
        self._waits = False

    def close(self) -> None:
        """Closes; a later flush opens again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_whole(self) -> None:
        size = os.fstat(self._descriptor).st_size
        rest = memoryview(bytes(self._pending))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):  # It is no regular file, say.
                os.ftruncate(self._descriptor, size)
            raise
        self._pending.clear()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if self._lines and size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # A killed writer has left half a line.
