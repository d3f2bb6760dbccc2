"""A file that is only appended to, and that tolerates a full disk."""

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("apex")

MAX_PENDING_BYTES = 1 << 20  # maximum unwritten bytes of one file; further records are dropped and counted


class AppendFile:
    """A file to which only whole records are appended. Writing continues when a full disk has space again."""

    def __init__(self, path: Path, *, lines: bool = False) -> None:
        self.num_dropped = 0
        self.num_bytes = 0  # length of the file at the last flush
        self._path = path
        self._lines = lines
        self._descriptor = -1
        self._pending = bytearray()
        self._waits = False  # True while the disk refuses writes

    def append(self, record: bytes) -> None:
        """Buffers a record for the next flush. Drops and counts the record if the buffer is full."""
        if len(self._pending) + len(record) > MAX_PENDING_BYTES:
            self.num_dropped += 1
            return
        self._pending += record

    def flush(self) -> None:
        """Writes all buffered records or none of them, so that the file always ends with a whole record."""
        if not self._pending:
            return
        try:
            if self._descriptor >= 0 and not os.fstat(self._descriptor).st_nlink:
                self.close()  # The file was removed.
            if self._descriptor < 0:
                self._open()
            self._write_whole()
        except OSError as error:
            self.close()
            if not self._waits:
                cause = os.strerror(error.errno or errno.EIO)
                log.warning("cannot write %s: %s; the run continues, but its curves have a gap", self._path, cause)
            self._waits = True
            return
        if self._waits:
            log.warning("writing %s again; %d records were lost", self._path, self.num_dropped)
        self._waits = False

    def close(self) -> None:
        """Closes the file; a later flush opens it again."""
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
            with suppress(OSError):  # Fails, for example, if the path is not a regular file.
                os.ftruncate(self._descriptor, size)
            raise
        self.num_bytes = size + len(self._pending)
        self._pending.clear()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if self._lines and size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # A killed writer has left an incomplete line.
